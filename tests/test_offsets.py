"""Every offset is predicted, on many kinds of programs; `benchmarks.offsets` is the long version."""

from __future__ import annotations

import functools

import hlo_support as h
import jax
import pytest

import coop_jax as coop
from benchmarks.programs import SampleProgram, corpus
from coop_jax import aot, pinning, serialized
from coop_jax.addresses import address_view
from passes.backend import CPU
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.schema import schema
from passes.hlo.xla_assignment import compare, read_assignment

ON_CPU = (
    "gpt forward", "attention grad", "attention by head", "scanned rnn grad", "cond grad", "switch", "while",
    "nested loops", "fft", "sort and top k", "linear algebra", "random bits", "scatter", "slices",
    "u-net grad", "vae grad", "graph network grad", "mixture of experts grad",
)  # fmt: skip
UNITS = 4  # of the alignment: small programs have more pieces than a short search can place
ON_H200 = ("scanned rnn grad", "cond grad", "nested loops", "u-net grad")


@functools.cache
def programs() -> dict[str, SampleProgram]:
    """The corpus by name."""
    return {p.name: p for p in corpus()}


@functools.cache
def example(name: str) -> h.Example:
    """A program of the corpus, to be compiled once."""
    program = programs()[name]
    return h.Example(name=name, fn=program.fn, args=program.specs, donate=program.donate)


def test_the_corpus_is_large() -> None:
    assert len(programs()) == len(corpus()) >= 40


@pytest.mark.parametrize("name", ON_CPU)
def test_offsets_on_cpu(name: str) -> None:
    data, compiled = h.scheduled(example(name))
    assigner = Assigner(graph.read(proto.parse(data)), "cpu", old_rules=h.OLD_RULES)
    final = proto.parse(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    assigned = compiled.memory_analysis().serialized_buffer_assignment_proto
    real = read_assignment(assigned, final, schema(serialized.proto_library("cpu")))
    buffers, equal = compare(assigner, real)
    assert equal == buffers > 0
    assert real.temp_bytes == h.totals(compiled)["temp"]
    pinned = coop.pin(compiled)
    outcome = pinning.outcome_of(pinned)
    assert outcome is not None
    assert outcome.live_bytes is not None, outcome.reason
    assert outcome.temp_bytes <= 1.001 * outcome.live_bytes + UNITS * CPU.alignment
    args = h.data_for(example(name))
    assert all(
        a.tobytes() == b.tobytes() for a, b in zip(h.run(compiled, args), h.run(pinned, args), strict=True)
    )


@pytest.mark.parametrize("name", ON_H200)
def test_offsets_on_h200(h200: str, name: str) -> None:
    program = programs()[name]
    lowered = aot.lower_for(jax.jit(program.fn, donate_argnums=program.donate), program.specs, device=h200)
    compiled = lowered.compile()
    view = address_view(compiled)
    assert view.equal == view.buffers != 0
    assert view.predicted_temp_bytes == view.temp_bytes == aot.memory(compiled).temp_bytes
    assert view.live_bytes <= view.packed_bytes <= view.temp_bytes
    kept = pinning.outcome_of(coop.pin(compiled))
    assert kept is not None
    assert any(why in kept.reason for why in ("is not here to load it", "as good as the best"))


def test_a_pinned_program_shows_where_everything_lies() -> None:
    compiled = h.scheduled(example("attention grad"))[1]
    before, after = coop.inspect(compiled), coop.inspect(coop.pin(compiled))
    assert before.temp_bytes == h.totals(compiled)["temp"] > after.temp_bytes
    assert after.temp_bytes == address_view(compiled).live_bytes
    for found in (before, after):
        placed = [v for v in found.values if v.offset is not None]
        assert len(placed) == address_view(compiled).buffers
        for n, a in enumerate(placed):
            assert a.offset is not None
            assert a.offset + a.nbytes <= found.temp_bytes
            for b in placed[n + 1 :]:
                assert b.offset is not None
                apart = a.stop <= b.start or b.stop <= a.start
                assert apart or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
