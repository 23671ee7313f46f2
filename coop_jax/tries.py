"""Which other plans of a program are looked at, how often it is compiled for that, and how two compare.

For `coop_jax.alternatives`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from coop_jax import relowering, tuning
from coop_jax.known import Known
from coop_jax.record import UNLIMITED_BYTES, Record, Timed, with_hlo
from coop_jax.registry import Choice
from coop_jax.relowering import PLAIN, Plain, Variant, Wish
from coop_jax.text import format_bytes
from passes.backend import BACKENDS, Backend
from passes.cost import DEVICES
from passes.jaxpr.calibration import ROUNDED, STRICT
from passes.jaxpr.compat import BeingLowered
from passes.objective import LEAST_TIME, Objective, Price
from passes.outcome import StageOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesConfig:
    """What is tried, and how often; set by `benchmarks.promise` and `benchmarks.side_by_side`.

    Attributes:
        paged_share: of the program's time in which the link carries what pages do, so that recompute aims for
            so much less: a step goes forward for a third of it, and then all that waits is on the host.
        ratios: shares that it aims for before a budget is refused; the last one asks for as little as can be:
            a program of many layers goes far below the others.
        cheaper_ratio: costs are estimates; what is cheaper by less is not worth a compile.
        missed_ratio: a plan whose program costs so much more than planned was made from a wrong estimate:
            DenseNet on the CPU 24 % more, GPT on a v6e 37 %, the other programs at most 13 %.
        policy_ratio: blocks under a policy that are expected to cost more of what a plan came to are not
            looked at: estimates of both miss by as much.
        counted_ratio: what is cheaper by less is not compiled to the end, for XLA's own count.
        most_looks: how often a program is compiled once more after the first plan.
        most_looks_if_kept: the same, if that kept the budget.
        most_asked: how many budgets are asked for to find the least that a refusal can name.
        asked_ratio: what is asked for next, as a share of what is met.
        most_counted: how often what a refusal would name is compiled to the end, for XLA's own count.
        most_counted_if_refused: how many plans are, each for as much less as the one before it was over.
    """

    paged_share: float = 1 / 3
    ratios: tuple[float, ...] = (0.84, 0.63, 0.49, 0.34, 0.24, 0.15, 0.08, 0.0)
    cheaper_ratio: float = 0.999
    missed_ratio: float = 1.15
    policy_ratio: float = 0.98
    counted_ratio: float = 0.95
    most_looks: int = 3
    most_looks_if_kept: int = 1
    most_asked: int = 8
    asked_ratio: float = 0.95
    most_counted: int = 3
    most_counted_if_refused: int = 6


TRIES = TriesConfig()


def backend_of(record: Record) -> Backend:
    """The platform that a program is compiled for."""
    return BACKENDS[DEVICES[record.device_name].platform]


def deeper(record: Record, refused: StageOutcome, *, milder: int = 0) -> list[Wish]:
    """Plans for fewer temporaries than the budget leaves, the mildest first; some `milder`."""
    left = (record.budget_bytes - refused.fixed_bytes) / max(refused.before_temp_bytes, 1)
    mildest = next((k for k, r in enumerate(TRIES.ratios) if r <= left), len(TRIES.ratios) - 1)
    ratios = TRIES.ratios[max(0, mildest - milder) :]
    return [dataclasses.replace(at_once(record), aim_bytes=None, temp_ratio=r) for r in ratios]


def less_recomputed(record: Record, first: StageOutcome) -> list[Wish]:
    """Plans for more temporaries than the budget leaves, for pages to do the rest: for as much more as the
    link carries meanwhile, for half of that, and for all; none without host memory, or where nothing is
    recomputed."""
    planned, link = record.jaxpr, DEVICES[record.device_name].host_link
    if not first.host_budget_bytes or planned is None or not planned.changed or link is None:
        return []
    seconds = TRIES.paged_share * first.cost_ns / 1e9
    carried = min(round(seconds * link.to_host_bytes_per_second), first.host_budget_bytes)
    aims = (record.budget_bytes + carried, record.budget_bytes + carried // 2, UNLIMITED_BYTES)
    return [dataclasses.replace(at_once(record), aim_bytes=n) for n in aims]


def at_once(record: Record) -> Wish:
    """What a request asks for by itself."""
    return Wish(budget_bytes=record.budget_bytes, aim_bytes=record.budget_bytes, whole=record.whole)


def as_it_is(record: Record) -> list[Wish]:
    """The program without `coop.remat`, unless that breaks a constraint."""
    return [] if record.constraints else [PLAIN]


def own_kernels(record: Record) -> list[Wish]:
    """The same with its kernels planned for the budget."""
    return [dataclasses.replace(asked, budget_bytes=record.budget_bytes) for asked in as_it_is(record)]


def before_refusal(
    record: Record,
    refused: StageOutcome,
    deepest: Callable[[Wish], tuple[Record | None, bool]],
    *,
    alone: bool = False,
) -> Iterator[Wish]:
    """Deeper plans, mildest first, then the program's own kernels planned, plans that count on rounded
    values, and last those with smaller kernels.

    Args:
        deepest: says what the deepest of them is planned as, and whether that was looked at.
        alone: whether to add the first and the deepest plan of a request without host memory.
    """
    ways = deeper(record, refused)
    planned, is_known = deepest(ways[-1])
    yield from [asked for asked in ways[:-1] if _is_milder(asked, planned)]
    yield from [] if is_known else ways[-1:]
    yield from own_kernels(record)
    if backend_of(record).rounds_products:
        milder = deeper(record, refused, milder=1)
        yield from [dataclasses.replace(asked, calibration=ROUNDED) for asked in (at_once(record), *milder)]
    if backend_of(record).fuses_results:
        yield from [dataclasses.replace(asked, calibration=STRICT) for asked in ways]
    if alone:
        yield from [dataclasses.replace(asked, alone=True) for asked in (at_once(record), ways[-1])]


def _is_milder(asked: Wish, deepest: Record | None) -> bool:
    """True for a share of the temporaries that is more than the deepest plan needs: others are that plan."""
    made = None if deepest is None else deepest.jaxpr
    return made is None or (asked.temp_ratio or 0) * made.before_temp_bytes > made.planned_temp_bytes


def plan_key(record: Record, asked: Wish) -> Hashable:
    """Equal for two plans that are one, asked for in other words; None where nothing was planned."""
    made = record.jaxpr
    return made and (
        made.changed, made.recipe, made.planned_temp_bytes, made.recomputed, made.tightest,
        asked.policy, asked.calibration.strict, asked.calibration.rounded, asked.alone, asked.whole,
    )  # fmt: skip


def rank(way: Choice | Variant) -> tuple[int, ...]:
    """Within the budget by price, else by bytes; smaller is better."""
    verdict = hlo_of(way)
    if verdict.status.found:
        return False, *price_of(way)
    least = verdict.least_total_bytes
    return True, verdict.fixed_bytes + verdict.before_temp_bytes if least is None else least


def distinct(kept: Iterable[tuple[Wish, Variant]]) -> list[tuple[Wish, Variant]]:
    """What keeps a budget, but for what takes the very time and bytes of one before it: it is the same
    program."""
    found: dict[tuple[int, ...], tuple[Wish, Variant]] = {}
    for way in kept:
        found.setdefault((*rank(way[1]), hlo_of(way[1]).planned_total_bytes), way)
    return list(found.values())


def price_of(way: Choice | Variant) -> Price:
    """What the objective makes of a way's time and energy."""
    hlo = hlo_of(way)
    slower_ratio, _ = way.record.changes
    base_ns = round(hlo.run_ns / (1 + slower_ratio))
    return way.record.objective.price(
        cost_ns=hlo.run_ns, energy_pj=hlo.energy_pj + hlo.recompute_pj, base_ns=base_ns
    )


def price_of_plain(plain: Plain, objective: Objective) -> Price:
    """The same of the program without `coop.remat`."""
    return objective.price(cost_ns=plain.cost_ns, energy_pj=plain.energy_pj, base_ns=plain.cost_ns)


def is_cheaper(price: Price, than: Price, ratio: float = TRIES.cheaper_ratio) -> bool:
    """True if a price is worth a look."""
    return price < (than[0], ratio * than[1])


def said_of(asked: Wish, budget_bytes: int) -> str:
    """What is being done for a wish."""
    within = f"for {format_bytes(budget_bytes, exact=False)}"
    if asked.plain:
        return f"compiling the program as it is, {within}"
    if asked.policy:
        return f"looking at {asked.policy} around blocks, {within}"
    if asked.temp_ratio is not None:
        return f"planning for {asked.temp_ratio:.0%} of the temporaries, {within}"
    return f"planning once more, {within}"


def hlo_of(way: Choice | Variant) -> StageOutcome:
    """What the enforcing stage said of a way."""
    assert way.record.hlo is not None, "the enforcing stage has spoken"
    return way.record.hlo


def keeps(way: Choice | Variant, budget_bytes: int) -> bool:
    """True if a way is known to need no more than a budget, which need not be its own."""
    return hlo_of(way).status.found and hlo_of(way).planned_total_bytes <= budget_bytes


def is_kept(way: Choice | Variant) -> bool:
    """True if a way keeps its budget as it was planned: what only pages keep in it was missed."""
    return hlo_of(way).status.found and not hlo_of(way).paged


def is_as_planned(way: Choice | Variant) -> bool:
    """True if a way keeps its budget by what was planned before XLA alone."""
    hlo = hlo_of(way)
    came_with_bytes = hlo.fixed_bytes + hlo.before_temp_bytes
    return hlo.status.found and (not hlo.changed or came_with_bytes <= hlo.budget_bytes)


def may_cost_less_by_itself(way: Choice | Variant) -> bool:
    """True if a way missed what its plan promised, or came to much more than the program's own kernels are
    expected to take, some of them run again.

    Before XLA all times are estimated alike too long or too short, so what the enforcing stage added counts
    as a share of the module that it came to. Where XLA computes what follows a product in its kernel, the
    estimates of both miss by as much: barriers of a plan take that apart. A GPT's step on a v5e, within half
    of its bytes: 16 % more by the plan, 19 by its kernels; 19 expected of the program's own, and 8 by them.
    """
    planned, hlo = way.record.jaxpr, hlo_of(way)
    if planned is None or planned.kernels_ns is None:
        return False
    promised_ns, cost_ns = planned.run_ns, hlo.run_ns
    came_to_ns = max(cost_ns, promised_ns * cost_ns // max(hlo.cost_ns, 1))
    is_missed = not is_kept(way) or came_to_ns >= TRIES.missed_ratio * promised_ns
    if is_missed or backend_of(way.record).fuses_results:
        return planned.kernels_ns <= TRIES.missed_ratio * came_to_ns
    return TRIES.missed_ratio * planned.kernels_ns <= came_to_ns


def by_hand(record: Record, way: Choice | Variant) -> tuple[Wish, int] | None:
    """The blocks of a program under a ready policy of `jax.checkpoint`, and the time that they promise, where
    that is less than what a plan promised, and what the enforcing stage added to it, as a share; else None.

    Before XLA all times are estimated alike too long or too short.
    """
    planned, hlo = record.jaxpr, hlo_of(way)
    if planned is None or planned.policy_ns is None or record.constraints:
        return None
    promised = way.record.jaxpr or planned
    came_to_ns = promised.run_ns * hlo.run_ns // max(hlo.cost_ns, 1)
    if hlo.status.found and planned.policy_ns > TRIES.policy_ratio * came_to_ns:
        return None
    return dataclasses.replace(at_once(record), policy=planned.policy), planned.policy_ns


def is_much_deeper(made: Choice, first: Record) -> bool:
    """True if a plan promised to cost much more than the first did, which XLA made larger than planned.

    Calibration takes what it is larger by for a share of all temporaries, and plans for so much less. Where a
    few large kernels are the cause, to recompute some of them costs less.
    """
    one, other = first.jaxpr, made.record.jaxpr
    if one is None or other is None:
        return False
    return other.run_ns >= TRIES.missed_ratio * one.run_ns


def promises_no_less(planned: Record, than: Choice | None) -> bool:
    """True for a plan that takes as much longer than that of a way which keeps the budget as the enforcing
    stage made that way take: it may win only by an estimate that is wrong.

    Before XLA all times are estimated alike too long or too short, so both are shares.
    """
    if than is None:
        return False
    new, old, hlo = planned.jaxpr, than.record.jaxpr, hlo_of(than)
    if new is None or old is None or not is_kept(than) or planned.objective != LEAST_TIME:
        return False
    return new.run_ns * hlo.cost_ns >= old.run_ns * hlo.run_ns


def promises_more(planned: Record, most_ns: int | None) -> bool:
    """True for a plan that is expected to take longer."""
    return most_ns is not None and planned.jaxpr is not None and planned.jaxpr.run_ns > most_ns


def with_own_kernels(record: Record, asked: Wish, found: Variant) -> Record:
    """A record that knows what the program's own kernels take, where they are what was found."""
    if not asked.plain or record.baseline_cost_ns is not None:
        return record
    hlo = hlo_of(found)
    return dataclasses.replace(record, baseline_cost_ns=hlo.cost_ns, baseline_energy_pj=hlo.energy_pj)


def beside(record: Record, known: Record) -> Record:
    """A record of one way with what is `known` of the program's own kernels, of which all are changes."""
    return dataclasses.replace(
        record, baseline_cost_ns=known.baseline_cost_ns, baseline_energy_pj=known.baseline_energy_pj
    )


def as_counted[W: (Choice, Variant)](way: W, total_bytes: int) -> W:
    """A way with XLA's own count in the place of what was predicted."""
    temp_bytes = total_bytes - hlo_of(way).fixed_bytes
    counted = dataclasses.replace(hlo_of(way), planned_temp_bytes=temp_bytes)
    return dataclasses.replace(way, record=with_hlo(way.record, counted))


def known_of_plain(plain: Plain, objective: Objective) -> Known:
    """What is known by XLA's count of the program without `coop.remat`."""
    price = price_of_plain(plain, objective)
    return Known(wish=PLAIN, total_bytes=plain.memory.total_bytes, price=price)


def known_of(asked: Wish, way: Choice | Variant, counted_bytes: int | None) -> list[Known]:
    """What is known by a way: that it keeps its budget, or which larger ones it would keep."""
    outcome = hlo_of(way)
    if outcome.status.found:
        total_bytes, price = outcome.planned_total_bytes, price_of(way)
        return [Known(wish=asked, total_bytes=total_bytes, price=price, counted_bytes=counted_bytes)]
    larger = filter(None, (outcome.least_total_bytes, outcome.unsteered_bytes))
    return [Known(wish=dataclasses.replace(asked, budget_bytes=n), total_bytes=n) for n in larger]


def timed(program: BeingLowered, ways: Sequence[tuple[Wish, Variant]]) -> list[Timed]:
    """Run ways to write a program, and say what each took, in their order."""
    times_ns = tuning.run_times(
        [partial(relowering.compiled, program, asked, way.record) for asked, way in ways]
    )
    hlos = [hlo_of(way) for _, way in ways]
    return [
        Timed(run_ns=run_ns, estimated_ns=hlo.run_ns, total_bytes=hlo.planned_total_bytes)
        for run_ns, hlo in zip(times_ns, hlos, strict=True)
    ]
