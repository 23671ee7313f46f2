"""One scheduled module in the place of another one of the same program: whether it may go on there.

Calls into Python are by number, into a list that the runtime was given with the program that is compiled.
Another trace has a list of its own, in an order of its own, in which what runs twice stands twice. So its
calls are led to those of the first trace that do the same.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

from passes.hlo import proto, wire

Calls = Sequence[Callable[..., Any]]

# Of HloModuleProto: host_program_shape, input_output_alias, spmd_output_sharding,
# spmd_parameters_shardings, buffer_donor.
_SIGNATURE_FIELDS = (4, 8, 12, 14, 18)
# In the target of every call into Python, and how the call says its number.
_PYTHON = "python"
_NUMBER = re.compile(rb"(\bindex = )(\d+)")
# What JAX's own functions close over never changes, though it may be a dictionary of options.
_JAX = "jax."


def in_place_of(one: bytes, calls: Calls, other: bytes, other_calls: Calls) -> bytes | None:
    """`one`, made fit to go on in the place of `other`; None if it may not.

    They must take and return the same: shapes, layouts, shardings and donation.

    Args:
        one, other: serialized HloModuleProtos.
        calls, other_calls: the Python functions that they call, by number.
    """
    if signature(one) != signature(other):
        return None
    if not calls:
        return one
    numbers = _numbers(calls, other_calls)
    module = proto.parse(one)
    for computation in module.computations:
        for instruction in computation.instructions:
            if _PYTHON not in instruction.custom_call_target:
                continue
            match = _NUMBER.search(instruction.backend_config)
            number = None if match is None else numbers.get(int(match[2]))
            if match is None or number is None:
                return None
            text = b"%b%d" % (match[1], number)
            instruction.backend_config = _NUMBER.sub(text, instruction.backend_config, count=1)
    return proto.serialize(module)


def signature(data: bytes) -> list[tuple[int, bytes]]:
    """What a serialized module takes and returns: equal for those that may stand in each other's place."""
    fields = [(number, value) for number, value in wire.contents(data) if number in _SIGNATURE_FIELDS]
    return sorted(fields, key=lambda field: field[0])  # whoever wrote a module chose their order


def _numbers(calls: Calls, other_calls: Calls) -> dict[int, int]:
    """For every call the number of one that does the same."""
    if len(calls) == len(other_calls) == 1:
        return {0: 0}
    same = {
        number: next((k for k, other in enumerate(other_calls) if does_the_same(call, other)), None)
        for number, call in enumerate(calls)
    }
    return {number: k for number, k in same.items() if k is not None}


def does_the_same(one: Any, other: Any) -> bool:
    """True if two functions are one, or were made by the same line of the same values.

    A function that is written inside another one is a new object at every trace. It does the same as an
    earlier one if it has the same code, and all that it closes over does the same or is equal. What can
    change is the same only if it is one object.
    """
    return _does_the_same(one, other, set())


def _does_the_same(one: Any, other: Any, under_way: set[tuple[int, int]]) -> bool:
    if one is other or (id(one), id(other)) in under_way:
        return True
    if type(one) is not type(other):
        return False
    under_way = under_way | {(id(one), id(other))}
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        return _is_equal(one, other)
    return len(parts) == len(others) and all(
        _does_the_same(a, b, under_way) for a, b in zip(parts, others, strict=True)
    )


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What makes up a function or a record; None for anything else."""
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        cells: Iterable[Any] = map(_content, value.__closure__ or ())
        if value.__module__.startswith(_JAX):
            cells = (tuple(sorted(c.items())) if isinstance(c, dict) else c for c in cells)
        return (value.__code__, value.__globals__, *defaults, *cells)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *sorted(value.keywords.items()))
    if isinstance(value, tuple):
        return tuple(value)
    if dataclasses.is_dataclass(value) and value.__hash__ is not None:
        return tuple(getattr(value, f.name) for f in dataclasses.fields(value))
    return None


def _content(cell: CellType) -> Any:
    """What a function closes over; the cell itself where nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _is_equal(one: Any, other: Any) -> bool:
    """What has a hash says itself what it equals; what has none can change."""
    try:
        return hash(one) == hash(other) and bool(one == other)
    except Exception:  # whatever a user's object raises
        return False
