"""The compiler: pure functions over one IR (`passes.ir`), whose text is `passes.listing`'s."""

from passes import listing as listing
