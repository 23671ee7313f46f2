"""XLA's estimated cycles, read from the module that a TPU's program runs."""

from __future__ import annotations

from typing import Any

from benchmarks.cycles import program_cycles
from passes.hlo import proto


def _add(computation: Any, number: int, opcode: str, config: bytes = b"", *called: int) -> None:
    made = computation.instructions.add(id=number, name=f"{opcode}.{number}", opcode=opcode)
    made.shape.element_type = 11
    made.backend_config = config
    made.called_computation_ids.extend(called)
    computation.root_id = number


def _cycles(n: int) -> bytes:
    return b'{"window_config":{"estimated_cycles":"%d"}}' % n


def test_the_body_of_a_loop_counts_as_often_as_it_turns_and_nonsense_does_not_count() -> None:
    module = proto.parse(b"")
    body, test, entry = (module.computations.add(id=n, name=f"c{n}") for n in (1, 2, 3))
    _add(body, 1, "fusion", _cycles(100))
    _add(test, 2, "copy", _cycles(1))
    _add(entry, 3, "fusion", _cycles(7))
    _add(entry, 4, "while", b'{"known_trip_count":{"n":"12"}}', 1, 2)
    _add(entry, 5, "fusion", _cycles(2**63 - 5))
    _add(entry, 6, "fusion")
    module.entry_computation_id = 3
    module.schedule.sequences.add(key=3).value.instruction_ids.extend([3, 4, 5, 6])
    assert program_cycles(module) == 7 + 12 * 101
