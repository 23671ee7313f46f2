"""What follows from something, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def reached[T](starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """`starts`, and all that `following` leads to from there; it is asked once about each."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        new = [x for x in following(stack.pop()) if x not in seen]
        seen.update(new)
        stack.extend(new)
    return seen
