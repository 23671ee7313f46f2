"""Pages written into scheduled modules: taken by XLA, in the predicted bytes on both sides, equal numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import hlo_support as h
import numpy as np
import pytest

from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.graph import HOST
from passes.hlo.heap import layout
from passes.hlo.pages import Moments
from passes.ir import BufferId, Page


def host_bytes(compiled: Any) -> int:
    """XLA's own count of a program's memory on the host."""
    m = compiled.memory_analysis()
    held = m.host_argument_size_in_bytes + m.host_output_size_in_bytes - m.host_alias_size_in_bytes
    return int(held + m.host_temp_size_in_bytes)


def idle_bytes(found: h.Paged, platform: str) -> int:
    """What of the host's heap is between its values where most of it is taken."""
    _, live_bytes = layout(Assigner(graph.read(found.module), platform, old_rules=h.OLD_RULES), HOST)
    return found.prediction.host_bytes - live_bytes


def is_predicted(found: h.Paged, platform: str) -> bool:
    """True if both memories have the bytes that were predicted."""
    prediction, counted = found.prediction, host_bytes(found.compiled)
    if h.OLD_RULES and platform == "tpu":  # before JAX 0.12 XLA:TPU counts twice what is idle on the host
        counted -= idle_bytes(found, platform)
    return (prediction.total_bytes, prediction.host_bytes) == (h.totals(found.compiled)["total"], counted)


@pytest.mark.parametrize("model", ["mlp", "lstm", "scan"])
def test_pages_and_re_runs_on_a_gpu_take_the_predicted_bytes(h200: str, model: str) -> None:
    found = h.with_pages(h.example(model, "grad"), "cuda", seed=1, again=0.1)
    assert h.predicted(found.prediction) == h.totals(found.compiled)
    assert is_predicted(found, "cuda")
    seen = h.replayed(found.compiled)
    assert not seen.problems
    assert len(found.pages) >= seen.from_host >= seen.to_host > 0


@pytest.mark.parametrize("model", ["mlp", "gpt", "conv", "lstm", "scan", "cond"])
def test_pages_and_re_runs_on_a_tpu_take_the_predicted_bytes(v5e: str, model: str) -> None:
    found = h.with_pages(h.example(model, "grad"), "tpu", seed=2, again=0.1)
    assert is_predicted(found, "tpu")
    seen = h.replayed_module(found.module, "tpu")
    assert not seen.problems
    assert len(found.pages) >= seen.from_host >= seen.to_host > 0


@pytest.mark.parametrize("model", ["mlp", "gpt", "conv", "lstm", "scan", "cond", "mixed"])
def test_pages_as_plain_copies_give_the_same_bits(model: str) -> None:
    """The same rewriting with copies that a CPU has: what is read is what was sent."""
    example = dataclasses.replace(h.example(model, "grad"), optimized=True)
    args = h.data_for(example)
    _, plain = h.scheduled(example)
    found = h.with_pages(example, "cpu", seed=3, again=0.1, style="plain")
    assert len(found.pages) > 5
    assert h.predicted(found.prediction) == h.totals(found.compiled)
    for one, other in zip(h.run(plain, args), h.run(found.compiled, args), strict=True):
        assert np.array_equal(one, other, equal_nan=True)


def test_a_page_that_comes_back_before_it_has_left_is_refused() -> None:
    page = Page(buffer=BufferId(0), run=4, out_done=7, in_start=6, in_done=8)
    with pytest.raises(ValueError, match="does not leave, arrive and come back in this order"):
        Moments.of([page])
