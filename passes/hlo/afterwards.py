"""What XLA makes of a scheduled module after its callback, so that what is planned and predicted is that."""

from __future__ import annotations

from passes.backend import Backend
from passes.hlo.copies import without_copies
from passes.hlo.graph import Module
from passes.hlo.synchronous import with_synchronous


def as_xla_leaves_it(module: Module, backend: Backend, *, old_rules: bool = False) -> Module:
    """A module without barriers as XLA assigns its buffers; the same object if it is that already.

    Args:
        module: a view; its message is changed.
        backend: decides what XLA does.
        old_rules: see `passes.hlo.assign.Assigner`.
    """
    synchronous = with_synchronous(module, backend)
    return without_copies(synchronous, backend, old_rules=old_rules) if backend.drops_copies else synchronous
