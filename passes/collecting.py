"""Keep Python's collector of cycles away from work that makes many objects, none of which it could free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no cycles meanwhile; also a decorator.

    A stage makes hundreds of thousands of objects that live as long as it does, in no cycles. Each time that
    many survive, Python looks at all that the process has: a tenth of a compile of a GPT's step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
