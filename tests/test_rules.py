"""The rules of the exact packer: none makes an answer wrong, each may be switched off."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import items_to_pack

from benchmarks.pack import cut_up
from passes.offsets.infer import RuleSet
from passes.offsets.packing import Item, Span, check_packing, live_bytes
from passes.offsets.solver import Sweep

RULES = [field.name for field in dataclasses.fields(RuleSet)]


@settings(max_examples=25)
@given(items_to_pack(), st.sampled_from(RULES), st.integers(0, 3))
def test_an_answer_does_not_depend_on_a_rule(items: list[Item], rule: str, spare: int):
    capacity_bytes = live_bytes(items) + spare
    found = Sweep(items, capacity_bytes).solve(10**6)
    without = Sweep(items, capacity_bytes, on=RuleSet(**{rule: False})).solve(10**6)
    assert (found is None) is (without is None)
    if without is not None:
        check_packing(items, without, capacity_bytes)


def chains() -> list[Item]:
    """Seven items, chains among them, 16 bytes alive at once: no packing takes so few."""
    spans = (
        (
            (2, 5, 1),
            (5, 6, 3),
        ),
        (
            (3, 6, 3),
            (6, 7, 1),
        ),
        ((3, 6, 4),),
        (
            (0, 2, 2),
            (2, 3, 3),
        ),
        ((3, 7, 3),),
        (
            (3, 4, 3),
            (4, 8, 1),
        ),
        ((2, 6, 2),),
    )
    return [tuple(Span(start=a, stop=b, nbytes=n) for a, b, n in item) for item in spans]


@pytest.mark.parametrize("rule", ["dominance", "memory"])
def test_without_a_rule_a_proof_tries_more(rule: str):
    items = chains()
    every = Sweep(items, live_bytes(items))
    without = Sweep(items, live_bytes(items), on=RuleSet(**{rule: False}))
    assert every.solve(1000) is without.solve(1000) is None
    assert without.tries > 1.3 * every.tries


@pytest.mark.parametrize("rule", ["canonical", "heads", "not_first", "parts"])
def test_without_a_rule_more_is_tried(rule: str):
    items = cut_up(70, 100, 128, 0)
    every, without = Sweep(items, 128), Sweep(items, 128, on=RuleSet(**{rule: False}))
    assert every.solve(5000) is not None
    assert without.solve(5000) is not None
    assert without.tries > every.tries
