"""What an outcome lists: the ops that are recomputed, and what is alive at the tightest point."""

from __future__ import annotations

from strategies import example

from passes.ir import OpId
from passes.outcome import MAX_TIGHTEST, Recomputed, recomputed_by, tightest_values
from passes.simulate import simulate


def _steps(*ids: int) -> list[OpId]:
    return [OpId(i) for i in ids]


def test_every_re_run_is_listed_once_in_order() -> None:
    program = example()
    assert recomputed_by(program, _steps(0, 1, 2, 3, 4, 5), "hlo") == ()
    again = recomputed_by(program, _steps(0, 1, 2, 3, 0, 1, 4, 0, 5), "jaxpr")
    assert [r.op for r in again] == [program.ops[i].name for i in (0, 1, 0)]
    op = program.ops[0]
    nbytes = sum(program.buffers[b].nbytes for b in op.outputs)
    assert again[0] == Recomputed(
        op=op.name, source=op.source, nbytes=nbytes, cost_ns=op.cost_ns, stage="jaxpr"
    )


def test_an_op_that_has_only_moved_does_not_run_again() -> None:
    program = example()
    # Nothing reads the first run of 1, nor that of 0 which only that one reads.
    assert recomputed_by(program, _steps(0, 1, 0, 1, 2, 3, 4, 5), "hlo") == ()


def test_the_tightest_values_add_up_to_the_peak() -> None:
    program = example()
    for steps in (_steps(0, 1, 2, 3, 4, 5), _steps(0, 1, 2, 3, 1, 4, 5)):
        values = tightest_values(program, steps)
        assert len(values) < MAX_TIGHTEST
        assert sum(v.nbytes for v in values) == simulate(program, steps).peak_bytes
        assert list(values) == sorted(values, key=lambda v: -v.nbytes)
