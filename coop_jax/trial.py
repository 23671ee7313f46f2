"""Try a program out: compile it as far as XLA's schedule, and hear what the enforcing stage says of it.

The compile is broken off there, before code is generated. What is learned is exact, where the jaxpr stage
only estimates: small programs, in which XLA's own choices (merged dots, split sums, layouts) outweigh the
plan's, are settled this way; see `coop_jax.lowering`.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from coop_jax import again, aot, xla
from passes.jaxpr import compat
from passes.jaxpr.measured import Measured
from passes.jaxpr.stage import JaxprRequest
from passes.outcome import StageOutcome, scaled

SMALL_BYTES = 256 << 20
MAX_TRIALS = 4
STRICT_RATIO = 1.5
CHEAP_REPAIR_RATIO = 0.02
FAR_BELOW_RATIO = 4
SHORT_EQUATIONS = 400
PARTS_OF_CORRECTION = (0.5, 0.25, 0.75)

coop_trial_p = compat.new_primitive("coop_trial")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a program is split over several devices.

    Attributes:
        arguments: a sharding for each.
        outputs: a sharding for each, None where XLA decides.
        parts: how many devices' bytes make the whole program's, as it is planned.
    """

    arguments: tuple[Any, ...]
    outputs: tuple[Any, ...]
    parts: int


def try_out(
    closed: Any,
    record: xla.Record,
    device: Any,
    donated: Sequence[int] = (),
    partition: Partition | None = None,
) -> StageOutcome | None:
    """What the enforcing stage makes of `closed` with the budget of `record`, compiled for `device`.

    Args:
        closed: the whole program, a closed jaxpr.
        record: budget of one device, planner and cost model.
        device: present, or absent (see `coop_jax.aot`).
        donated: indices of arguments that are donated.
        partition: of a program over several devices; `device` is then not looked at.

    Returns:
        The enforcing stage's outcome, in bytes of all parts; None if XLA failed before it was asked.
    """
    where = [None] * len(closed.in_avals) if partition is None else partition.arguments
    outputs = {} if partition is None else {"out_shardings": list(partition.outputs)}
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(closed.in_avals, where, strict=True)
    ]

    def run(*values: Any) -> Sequence[Any]:
        return list(coop_trial_p.bind(*values, jaxpr=closed))

    with warnings.catch_warnings(), jax.debug_key_reuse(False):
        warnings.simplefilter("ignore")
        jitted = jax.jit(run, donate_argnums=tuple(donated), keep_unused=True, **outputs)
        try:
            lowered = jitted.lower(*(aot.sharded_specs(specs, device) if partition is None else specs))
        except ValueError:  # a program for several devices, such as one with `shard_map` inside
            return None
        found = xla.look(lowered, record)
    if found is None or partition is None:
        return None if found is None else found.outcome
    return scaled(found.outcome, times=partition.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One answer of the jaxpr stage.

    Attributes:
        made: what the caller goes on with.
        outcome: the jaxpr stage's.
        trace: gives the whole program that comes of it, a closed jaxpr; large programs never need it.
    """

    made: Any
    outcome: StageOutcome
    trace: Callable[[], Any]


def settle(
    attempt: Callable[[JaxprRequest], Attempt],
    request: JaxprRequest,
    record: xla.Record,
    device: Any,
    donated: Sequence[int] = (),
    partition: Partition | None = None,
) -> tuple[Any, StageOutcome]:
    """The jaxpr stage's answer; for a small program the best of a few, tried out on `device`.

    Best is what keeps the budget at the least estimated cost of its final kernels, else what comes nearest.
    A program is asked for again, for fewer bytes, as long as the enforcing stage has to change it; where
    XLA made something else of it than was planned, XLA is first left less freedom. A program with rewritten
    scans, inside which the enforcing stage changes nothing, is asked for again with what was measured, until
    what is expected to be best has been tried. A deeper plan is not always a smaller program: before a budget
    is given up, plans less deep than the first correction asked for are tried.
    The outcome's seconds are of all attempts and trials together.
    """
    started = time.perf_counter()

    def compiled(program: Any) -> StageOutcome | None:
        return try_out(program, record, device, donated, partition)

    made, outcome = _settle(attempt, request, compiled)
    return made, dataclasses.replace(outcome, seconds=time.perf_counter() - started)


def _settle(
    attempt: Callable[[JaxprRequest], Attempt],
    request: JaxprRequest,
    compiled: Callable[[Any], StageOutcome | None],
) -> tuple[Any, StageOutcome]:
    first = attempt(request)
    asked = again.wish()
    if asked is not None and asked.temp_ratio is not None:  # one of many alternatives, looked at as a whole
        return first.made, first.outcome
    small = first.outcome.before_temp_bytes <= SMALL_BYTES or _is_short(first)
    if not small or request.temp_budget_bytes <= 0:
        return first.made, first.outcome
    if first.trace().effects:  # such as a named axis, which only the enclosing program binds
        return first.made, first.outcome
    if not first.outcome.changed and (
        request.baseline_total_bytes is not None
        or first.outcome.before_temp_bytes * FAR_BELOW_RATIO <= request.temp_budget_bytes
    ):
        return first.made, first.outcome
    tries = _Tries(compiled=compiled)
    found, corrections = first, []
    for n in range(MAX_TRIALS):
        if n:
            found = attempt(request)
        if tries.has(found, request):
            break
        verdict = tries.verdict(found, request)
        if verdict is None:
            break
        if _has_rewritten_scans(found.outcome):
            request = dataclasses.replace(
                request, measured=(*request.measured, _measured(found.outcome, verdict))
            )
        elif verdict.status.found and verdict.recompute_ns <= CHEAP_REPAIR_RATIO * verdict.cost_ns:
            break
        else:
            corrections.append(_excess_ratio(found.outcome, verdict))
            request = _for_fewer_bytes(request, found.outcome, verdict)
    if not tries.kept and corrections:
        for part in PARTS_OF_CORRECTION:
            milder = dataclasses.replace(request, bytes_ratio=corrections[0] ** part)
            found = attempt(milder)
            if not tries.has(found, milder):
                tries.verdict(found, milder)
            if tries.kept:
                break
    chosen = tries.best or first
    return chosen.made, chosen.outcome


@dataclass(slots=True, kw_only=True)
class _Tries:
    """What was tried out so far, and the best of it."""

    compiled: Callable[[Any], StageOutcome | None]
    best: Attempt | None = None
    rank: tuple[bool, int] = (True, 1 << 62)
    seen: set[Hashable] = field(default_factory=set)

    @property
    def kept(self) -> bool:
        """True if something kept the budget."""
        return not self.rank[0]

    def has(self, found: Attempt, request: JaxprRequest) -> bool:
        """True if this was tried out, asked for in other words."""
        return self._key(found, request) in self.seen

    def verdict(self, found: Attempt, request: JaxprRequest) -> StageOutcome | None:
        """Try one out."""
        self.seen.add(self._key(found, request))
        verdict = self.compiled(found.trace())
        if verdict is not None and (self.best is None or _rank(verdict) < self.rank):
            self.best, self.rank = found, _rank(verdict)
        return verdict

    def _key(self, found: Attempt, request: JaxprRequest) -> Hashable:
        plan = found.outcome
        return request.strict, plan.changed, plan.planner, plan.planned_temp_bytes, plan.recompute_ns


def _for_fewer_bytes(request: JaxprRequest, planned: StageOutcome, verdict: StageOutcome) -> JaxprRequest:
    ratio = _excess_ratio(planned, verdict)
    if ratio > STRICT_RATIO and planned.changed and not request.strict:
        return dataclasses.replace(request, strict=True, bytes_ratio=1.0)
    return dataclasses.replace(request, bytes_ratio=max(ratio, 1.05 * request.bytes_ratio))


def _excess_ratio(planned: StageOutcome, verdict: StageOutcome) -> float:
    """What XLA made of a plan, as a multiple of the plan's bytes."""
    return verdict.before_temp_bytes / max(planned.planned_temp_bytes, 1)


def _has_rewritten_scans(planned: StageOutcome) -> bool:
    return planned.planner.startswith("scan")


def _measured(planned: StageOutcome, verdict: StageOutcome) -> Measured:
    budget = verdict.budget_bytes - verdict.fixed_bytes
    return Measured(
        planner=planned.planner,
        estimated_bytes=planned.planned_temp_bytes,
        temp_bytes=min(verdict.before_temp_bytes, budget)
        if verdict.status.found
        else verdict.before_temp_bytes,
    )


def _is_short(attempt: Attempt) -> bool:
    """True for a rewritten scan: few equations, and inside it the enforcing stage can change nothing."""
    return (
        _has_rewritten_scans(attempt.outcome)
        and len(compat.open_jaxpr(attempt.trace())[0].eqns) <= SHORT_EQUATIONS
    )


def _rank(verdict: StageOutcome) -> tuple[bool, int]:
    """Within the budget by cost, else by bytes; smaller is better."""
    if verdict.status.found:
        return False, verdict.cost_ns + verdict.recompute_ns
    return True, _least_temp_bytes(verdict)


def _least_temp_bytes(verdict: StageOutcome) -> int:
    least = verdict.least_total_bytes
    return verdict.before_temp_bytes if least is None else max(least - verdict.fixed_bytes, 1)


compat.define_abstract(coop_trial_p, lambda *, jaxpr: (jaxpr.out_avals, jaxpr))
compat.register_lowering(
    coop_trial_p, lambda ctx, *operands, jaxpr: compat.lower_inline(ctx, jaxpr, operands)
)
