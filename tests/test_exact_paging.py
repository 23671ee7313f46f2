"""The exact mode and the director with pages against brute force over all plans.

40 programs; as many as `COOP_QUESTIONS` says if it is in the environment, from the seed `COOP_FIRST_SEED` on.
"""

from __future__ import annotations

import dataclasses
import os
import random

from oracle_paging import Search, least_ns
from strategies import chain

from passes.ir import Buffer, BufferId, Op, OpId, Program, Status
from passes.link import Link
from passes.liveness import Graph
from passes.objective import Objective
from passes.planners import PlannerConfig, plan
from passes.planners.exact.pages import PROVED
from passes.simulate import simulate
from passes.validate import validate

LINK = Link(name="slow", to_host_bytes_per_second=1e9, from_host_bytes_per_second=1e9)
FRUGAL = dataclasses.replace(LINK, picojoules_per_byte=1.0)
QUICK = 20_000
QUESTIONS = int(os.environ.get("COOP_QUESTIONS", "40"))
FIRST_SEED = int(os.environ.get("COOP_FIRST_SEED", "0"))


def drawn(seed: int, n_ops: int = 4) -> Program:
    """A program whose ops may not all be recomputed, with scratch and places that outputs may take."""
    draw = random.Random(seed)
    ops = []
    for i in range(n_ops):
        inputs = sorted(draw.sample(range(i), min(i, draw.choice((1, 1, 2)))))
        share = [(BufferId(i), BufferId(inputs[0]))] if inputs and draw.random() < 0.2 else []
        ops.append(
            Op(
                id=OpId(i), inputs=tuple(map(BufferId, inputs)), outputs=(BufferId(i),),
                cost_ns=draw.randint(0, 9), recomputable=draw.random() < 0.7,
                workspace_bytes=draw.choice((0, 0, 1)), may_share=tuple(share),
            )
        )  # fmt: skip
    sizes = [draw.randint(1, 3) for _ in ops]
    return Program.build(
        name=f"drawn {seed}", ops=tuple(ops), outputs=(BufferId(n_ops - 1),),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(sizes)),
    )  # fmt: skip


def questions(count: int) -> list[tuple[Program, int, int]]:
    """Programs with budgets of device and host that something must give way to."""
    found: list[tuple[Program, int, int]] = []
    seed = FIRST_SEED
    while len(found) < count:
        program, draw = drawn(seed, 3 + seed % 2), random.Random(seed)
        peak_bytes = simulate(program).peak_bytes
        least_bytes = max(Graph.of(program).local_bytes)
        if least_bytes < peak_bytes:
            found.append((program, draw.randint(least_bytes, peak_bytes - 1), draw.choice((3, 100))))
        seed += 1
    return found


def test_brute_force_agrees_with_the_exact_mode_and_never_with_less_than_the_bound():
    seen = {"found": 0, "paged": 0, "director": 0}
    for program, budget_bytes, host_bytes in questions(QUESTIONS):
        options = {"host_bytes": host_bytes, "link": LINK, "work_limit": QUICK}
        quick = plan(program, budget_bytes, PlannerConfig(**options))
        made = plan(program, budget_bytes, PlannerConfig(planner="exact", **options))
        for one in (quick, made):
            validate(program, one, LINK)
        limit_ns = round(program.cost_ns * (1 + made.overhead_ratio)) if made.status.found else 60
        best_ns = least_ns(program, budget_bytes, host_bytes, LINK, limit_ns)
        assert made.status.found == (best_ns is not None)
        if best_ns is not None:
            assert made.planner == PROVED or made.status is Status.OPTIMAL
            assert limit_ns == best_ns
            assert quick.lower_bound_ratio * program.cost_ns <= best_ns - program.cost_ns + 1e-6
            seen["found"] += 1
            seen["paged"] += bool(made.pages)
            seen["director"] += quick.status.found and quick.overhead_ratio <= made.overhead_ratio + 1e-9
    assert seen["paged"] >= QUESTIONS / 4, seen
    assert seen["director"] >= 0.7 * seen["found"], seen


def test_a_training_step_with_pages_is_proved():
    program = chain(4)
    budget_bytes = int(0.8 * simulate(program).peak_bytes)
    rate = 0.7e9 * budget_bytes / program.cost_ns
    link = Link(to_host_bytes_per_second=rate, from_host_bytes_per_second=rate)
    quick = plan(program, budget_bytes, PlannerConfig(host_bytes=10**6, link=link))
    made = plan(program, budget_bytes, PlannerConfig(planner="exact", host_bytes=10**6, link=link))
    validate(program, made, link)
    assert made.planner == PROVED or made.status is Status.OPTIMAL
    assert made.overhead_ratio <= quick.overhead_ratio


def test_brute_force_agrees_with_the_exact_mode_about_energy():
    """POET's question: the least energy within both budgets and a limit of time."""
    seen = {"paged": 0, "dearer": 0}
    for plain, budget_bytes, host_bytes in questions(20):
        draw = random.Random(plain.name)
        ops = tuple(dataclasses.replace(op, energy_pj=draw.randint(1, 9)) for op in plain.ops)
        program = dataclasses.replace(plain, ops=ops)
        most = draw.choice((0.3, 1.0, None))
        objective = Objective(least="energy", max_overhead=most)
        options = {"host_bytes": host_bytes, "link": FRUGAL, "work_limit": QUICK, "objective": objective}
        quick = plan(program, budget_bytes, PlannerConfig(**options))
        made = plan(program, budget_bytes, PlannerConfig(planner="exact", **options))
        validate(program, made, FRUGAL)
        limit_ns = 200 if most is None else int(program.cost_ns * (1 + most))
        least_pj = Search(program, budget_bytes, host_bytes, FRUGAL).least_pj(limit_ns)
        assert least_pj == (made.energy_pj if made.status.found else None)
        if made.status.found:
            assert made.planner == PROVED
            assert not quick.status.found or made.energy_pj <= quick.energy_pj
        seen["paged"] += bool(made.pages)
        seen["dearer"] += quick.status.found and made.energy_pj < quick.energy_pj
    assert seen["paged"] >= 3, seen


def test_least_energy_without_a_host_is_proved():
    plain = chain(3)
    ops = tuple(dataclasses.replace(op, energy_pj=1 + op.id % 3) for op in plain.ops)
    program = dataclasses.replace(plain, ops=ops)
    budget_bytes = int(0.8 * simulate(program).peak_bytes)
    made = plan(program, budget_bytes, PlannerConfig(planner="exact", objective=Objective(least="energy")))
    validate(program, made, None)
    assert made.planner == PROVED
    assert not made.pages
    assert made.energy_pj == sum(program.ops[step].energy_pj for step in made.steps)
