"""The drawn networks: that each can be traced, and what the table says of them."""

from __future__ import annotations

import dataclasses

import jax

from benchmarks.random_blocks import Row, depths, drawn, table


def test_every_drawn_network_has_a_step() -> None:
    for seed in range(12):
        net = drawn(seed)
        state, x = net.specs()
        assert jax.tree.structure(jax.eval_shape(net.step, state, x)) == jax.tree.structure(state)
        assert drawn(seed) == net
        some, every = depths(seed)
        assert 0 < some < every == net.layers


def test_the_table_names_what_was_refused_first() -> None:
    kept = Row(
        seed=3, deep=3, layers=3, net=str(drawn(3)), device="h200", plain_bytes=1000, plain_ns=100,
        hand_bytes=500, hand_ns=120, coop_bytes=490, coop_ns=110, commit="abc",
    )  # fmt: skip
    refused = dataclasses.replace(kept, seed=4, coop_bytes=0, coop_ns=0)
    text = table([kept, refused, dataclasses.replace(kept, deep=2, coop_ns=130)])
    assert "Of 2 drawn networks 1 were refused" in text
    assert "Of 1 drawn networks 0 were refused" in text
    *_, first, second, third = text.strip().splitlines()
    assert "refused" in first
    assert "1.083" in second
    assert "0.917" in third
