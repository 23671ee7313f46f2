"""Keep what CPython does for memory of its own away from work that takes long."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Eight bytes each; what is called has as much room at least.
_STACK_WORDS = 1 << 15


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


def on_deep_stack[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function` with room on Python's stack for all that it calls.

    Python keeps its frames in chunks of 16 KiB. Where a loop stands at the end of one, every call that it
    makes maps another chunk, and unmaps it: where XLA calls back, 50 calls deep, one estimate took 8,000 page
    faults, and five times as long. A frame that is large itself gets a chunk of at least twice its size.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_STACK_WORDS)
    return functools.wraps(function)(call)
