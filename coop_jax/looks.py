"""The search for another way to keep one budget: what is looked at, in which order, and what is taken.

For `coop_jax.alternatives`, which says why; `coop_jax.tries` says what and how often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

from coop_jax import counting, relowering, tries, tuning
from coop_jax.known import Known, Memory, cheapest_first, is_answer, least_above, least_answered_above
from coop_jax.record import UNLIMITED_BYTES, Record, with_hlo
from coop_jax.registry import Choice
from coop_jax.relowering import Plain, Variant, Wish
from coop_jax.replacing import Calls, in_place_of, signature
from coop_jax.tries import TRIES, hlo_of, is_cheaper, plan_key, price_of, rank
from coop_jax.verdict import named
from passes.jaxpr.calibration import UNCALIBRATED
from passes.jaxpr.compat import BeingLowered
from passes.outcome import StageOutcome

MEMORY = Memory()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """How to write one program once more, and what is known of that.

    Attributes:
        program: how to lower it again.
        key: tells programs apart, whatever their budgets.
        alone: the key of the same program without the host memory that this one has; "" if it has none.
        calls: the Python functions that it calls, by number.
    """

    program: BeingLowered
    key: str
    alone: str = ""
    calls: Calls = ()

    def learn(self, asked: Wish, way: Choice | Variant, counted_bytes: int | None = None) -> None:
        """Remember what keeps its budget, or what would keep a larger one."""
        for found in tries.known_of(asked, way, counted_bytes):
            MEMORY.learn(self.key, found)


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for another way to keep one budget.

    Attributes:
        tell: is told of everything that takes long.
        module: the scheduled module that another one must be able to replace; None if there is none yet.
        seen: the plans that were looked at.
        kept: what was looked at and keeps the budget.
        scheduled: what XLA made of all that was looked at: a budget changes what is held to it, not what XLA
            makes of a plan.
        looks: how often something was compiled, or what XLA had made of it was looked at again.
        asked: how many looks were asked for once something kept the budget.
        limited: True if something was not looked at, since that would have taken too long.
        steering: whether a packing that is steered is "counted" by XLA, "trusted", or "failed" once.
        alone: True for the search of a request without the host's memory, whatever the user gives of it.
    """

    ways: Ways
    record: Record
    tell: Callable[[str], None]
    module: bytes | None = None
    seen: set[tuple[Hashable, int]] = field(default_factory=set)
    kept: list[tuple[Wish, Variant]] = field(default_factory=list)
    scheduled: dict[str, bytes] = field(default_factory=dict)
    looks: int = 0
    asked: int = 0
    limited: bool = False
    steering: Literal["counted", "trusted", "failed"] = "counted"
    alone: bool = False

    def cheapest(self, first: Choice) -> Choice:
        """The cheapest way that is found, given what XLA made of the first; else the refusal."""
        first_wish = tries.at_once(self.record)
        self.is_seen(self.record, first_wish)
        tuned = self.paged(self.tuned(first), hlo_of(first))
        if not hlo_of(tuned).status.found:
            return self.instead_of(first)
        tuned = self.with_its_own_kernels(self.with_a_milder_plan(tuned, hlo_of(first)))
        taken = self.cheaper_than(tuned)
        if taken is None and tuned is first:
            self.ways.learn(first_wish, first)
        best = taken or tuned
        return self.by_count(best) or best

    def _in_time(self, best: Choice, look: Callable[[], Variant | None]) -> Variant | None:
        """What one more look finds, if that takes no longer than the compile that it is for, with those
        before it; what is only planned, and not compiled, is not counted."""
        kept, looks = tries.is_kept(best), self.looks
        if kept and self.asked >= tries.backend_of(self.record).looks:
            self.limited = True
            return None
        found = look()
        self.asked += kept and self.looks > looks
        return found

    def as_one(self, first: Choice) -> Choice:
        """The whole program planned, where the plans of the functions in it do not keep the budget alone.

        What is looked at afterwards is of the whole, too, as often as where the whole is decorated.
        """
        if self.ways.program.as_one is None or tries.is_as_planned(first):
            return first
        whole = dataclasses.replace(self.record, whole=True)
        variant = self._look(tries.at_once(whole))
        if variant is None or rank(variant) >= rank(first):
            return first
        self.record = dataclasses.replace(whole, jaxpr=variant.record.jaxpr)
        return self._choice(variant)

    def tuned(self, first: Choice) -> Choice:
        """The best of the plans that follow one from the other from what XLA made of the first, and of the
        blocks under a ready policy, where these promise less.

        Best is what keeps the budget at the least estimated time of its kernels, else what comes nearest.
        """
        by_hand = tries.by_hand(self.record, first)
        best = self._followed(first, None if by_hand is None else by_hand[1])
        if (by_hand := tries.by_hand(self.record, best)) is not None:
            variant = self._in_time(best, partial(self._look, by_hand[0]))
            if variant is not None and rank(variant) < rank(best):
                return self._choice(variant)
        return best

    def _followed(self, first: Choice, promised_ns: int | None) -> Choice:
        """The best of the plans alone; `promised_ns`: what the first of them must not promise more than."""
        best, planned, verdict = first, first.record.jaxpr, hlo_of(first)
        calibration = UNCALIBRATED
        for n in range(TRIES.most_looks):
            is_enough = tries.is_kept(best) and n >= TRIES.most_looks_if_kept
            if planned is None or verdict.needs_pinning or is_enough:
                break
            following = calibration.after(planned, verdict)
            if following is None:
                break
            calibration = following
            asked = dataclasses.replace(tries.at_once(self.record), calibration=calibration)
            most_ns = None if n else promised_ns
            variant = self._in_time(best, partial(self._look, asked, than=best, most_ns=most_ns))
            if variant is None:
                break
            planned, verdict = variant.record.jaxpr, hlo_of(variant)
            if rank(variant) < rank(best):
                best = self._choice(variant)
        return best

    def paged(self, best: Choice, first: StageOutcome) -> Choice:
        """What is known, or the first program that is better in which less is recomputed, and pages do the
        rest; these looks leave as many to those that follow as a request without host memory has."""
        asked_before = self.asked
        for asked in tries.less_recomputed(self.record, first):
            variant = self._in_time(best, partial(self._look, asked))
            if variant is not None and rank(variant) < rank(best):
                best = self._choice(variant)
                break
        self.asked = asked_before
        return best

    def without_host(self) -> Choice | None:
        """What a request without the host's memory takes; None if it finds nothing, or is this one."""
        if not self.ways.alone:
            return None
        alone = dataclasses.replace(
            self, ways=dataclasses.replace(self.ways, key=self.ways.alone, alone=""), alone=True,
            record=dataclasses.replace(self.record, host_budget_bytes=0), seen=set(), kept=[], asked=0,
        )  # fmt: skip
        first = alone._look(tries.at_once(alone.record))
        found = None if first is None else alone.cheapest(alone._choice(first))
        self.looks, self.limited = alone.looks, self.limited or alone.limited
        self.kept += [(dataclasses.replace(asked, alone=True), variant) for asked, variant in alone.kept]
        if found is None or not hlo_of(found).status.found:
            return None
        record = dataclasses.replace(self.record, jaxpr=found.record.jaxpr, hlo=found.record.hlo)
        return dataclasses.replace(found, record=record)

    def with_its_own_kernels(self, made: Choice) -> Choice:
        """The program as it is, held to the budget, where a plan seems dearer, and this turns out cheaper."""
        kernels = tries.own_kernels(self.record)
        if not kernels or not tries.may_cost_less_by_itself(made):
            return made
        return self._cheaper_of(made, kernels[0])

    def with_a_milder_plan(self, made: Choice, first: StageOutcome) -> Choice:
        """The mildest of the deeper plans, held to the budget, where one that is much deeper keeps it."""
        if not tries.is_much_deeper(made, self.record):
            return made
        return self._cheaper_of(made, tries.deeper(self.record, first)[0])

    def _cheaper_of(self, made: Choice, asked: Wish) -> Choice:
        variant = self._in_time(made, partial(self._try, asked, known=True))
        if variant is None or price_of(variant) >= price_of(made):
            return made
        return self._choice(variant)

    def fastest(self, best: Choice) -> Choice:
        """The fastest of the `tune` cheapest ways that keep the budget; `best` is one of them."""
        most = self.record.tune
        tuning.refuse_what_acts(tuple(self.ways.program.jaxpr.effects), self.ways.calls)
        if best.module is None:
            self._look(tries.at_once(self.record), known=True)
        for asked in (*tries.own_kernels(self.record), *tries.deeper(self.record, hlo_of(best))):
            if len(tries.distinct(self.kept)) < most:
                self._look(asked)
        found = sorted(tries.distinct(self.kept), key=lambda way: rank(way[1]))[:most]
        self.tell(f"running {len(found)} programs")
        timed = tries.timed(self.ways.program, found)
        order = sorted(range(len(found)), key=lambda k: (timed[k].run_ns, k))
        taken = self._choice(found[order[0]][1])
        record = dataclasses.replace(taken.record, timed=tuple(timed[k] for k in order))
        return dataclasses.replace(taken, record=record)

    def cheaper_than(self, first: Choice) -> Choice | None:
        """What is known to keep the budget for less time, if anything is; where nothing was planned, and the
        program keeps the budget without `coop.remat`, that is the only other way."""
        price = price_of(first)
        known = [k.wish for k in self._known() if k.price is not None and is_cheaper(k.price, price)]
        if known and not first.record.is_changed:
            plain = self._plain()
            if plain is not None and plain.memory.total_bytes <= self.record.budget_bytes:
                is_worth_it = is_cheaper(tries.price_of_plain(plain, self.record.objective), price)
                known = [relowering.PLAIN] if is_worth_it else []
        for asked in known:
            variant = self._try(asked, known=True)
            if variant is not None and is_cheaper(price_of(variant), price):
                return self._choice(variant)
        return None

    def by_count(self, made: Choice) -> Choice | None:
        """What keeps the budget by XLA's count alone, where what is predicted to keep it costs much more."""
        found = counting.by_count(self.record, made, look=self._look, count=self._counted)
        return None if found is None else self._choice(found)

    def _counted(self, asked: Wish, found: Variant) -> Variant:
        """What was looked at, with XLA's count of it, unless XLA refuses it."""
        counted_bytes = self._count(asked, found)
        if counted_bytes is None:
            return found
        self.ways.learn(asked, found, counted_bytes)
        counted = tries.as_counted(found, counted_bytes)
        self.kept += [(asked, counted)] if counted_bytes <= self.record.budget_bytes else []
        return counted

    def _wish(self, asked: Wish) -> Wish:
        return dataclasses.replace(asked, alone=asked.alone or self.alone)

    def _count(self, asked: Wish, found: Choice | Variant) -> int | None:
        if (known_bytes := MEMORY.counted(self.ways.key, asked)) is not None:
            return known_bytes
        self.tell("compiling to the end, for XLA's own count")
        self.looks += 1
        return relowering.count(self.ways.program, self._wish(asked), found.record)

    def as_packed[W: (Choice, Variant)](self, asked: Wish, way: W) -> W:
        """A way as XLA packs it, where it keeps its budget by a packing that is steered."""
        if self.steering == "trusted" or not counting.is_steered(self.record, way):
            return way
        counted_bytes = self._count(asked, way) if self.steering == "counted" else UNLIMITED_BYTES
        if counted_bytes is None or counted_bytes <= max(asked.budget_bytes, self.record.budget_bytes):
            self.ways.learn(asked, way, counted_bytes)
            return way if counted_bytes is None else tries.as_counted(way, counted_bytes)
        self.steering = "failed"
        MEMORY.forget(self.ways.key, asked)
        return counting.unsteered(way)

    def instead_of(self, first: Choice) -> Choice:
        """A way that keeps the budget, else the refusal with the least budget that is known."""
        refused = hlo_of(first)
        if refused.needs_pinning:
            return first
        self.ways.learn(tries.at_once(self.record), first)
        known = self._known()
        met = self._first((k.wish for k in known), known=True)  # seen for another budget: maybe far too deep
        if met is not None and is_answer(known, self.record.budget_bytes):
            return met
        found = self._first(tries.as_it_is(self.record)) or self.by_count(met or first)
        deeper = tries.before_refusal(self.record, refused, self._is_planned_before)
        found = found or self._first(deeper, than=met)
        least_bytes = None
        if met is None and found is None and (found := self.without_host()) is None and not self.alone:
            least_bytes = self.find_the_least(refused)
            found = self._first((k.wish for k in self._known() if k not in known), known=True)
        refusal = Choice(record=with_hlo(self.record, named(refused, self.record.budget_bytes, least_bytes)))
        return min(filter(None, (met, found)), key=rank, default=refusal)

    def _first(
        self, wishes: Iterable[Wish], known: bool = False, than: Choice | None = None
    ) -> Choice | None:
        """The first way that keeps the budget and promises less `than` another; `known`: they keep it."""
        tried = (self._try(asked, known=known, than=than) for asked in wishes)
        return next(map(self._choice, filter(None, tried)), None)

    def find_the_least(self, refused: StageOutcome) -> int | None:
        """What a refusal should name: what is met when it is asked for, by XLA's count, too.

        What is known was planned for other budgets: of ten small programs two refused in a fresh process what
        they had named. So that is asked for, and ever less, until something is refused.
        """
        refused_bytes = max(self.record.budget_bytes, refused.fixed_bytes - 1)
        met_bytes, most_bytes = None, UNLIMITED_BYTES
        for _ in range(TRIES.most_asked):
            least = self._least_above(refused_bytes)
            is_proved = refused.least_proved and least and least.sure_bytes == refused.least_total_bytes
            if least is None or is_proved or most_bytes <= refused_bytes:
                break
            asked_bytes = min(least.sure_bytes, most_bytes)
            if self.is_met(asked_bytes, refused, least.wish):
                met_bytes, most_bytes = asked_bytes, int(asked_bytes * TRIES.asked_ratio)
                continue
            refused_bytes = asked_bytes
            most_bytes = min(int(asked_bytes / TRIES.asked_ratio), self._answered_above(asked_bytes))
            if met_bytes is not None:
                break
        if met_bytes is None:
            refused_bytes = self.record.budget_bytes
        counting.count_the_least(
            self.record, lambda: self._least_above(refused_bytes), look=self._look, count=self._counted
        )
        least = self._least_above(refused_bytes)
        if met_bytes is not None:
            return met_bytes if least is None else max(met_bytes, least.counted_bytes or 0)
        return None if least is None else least.sure_bytes

    def is_met(self, budget_bytes: int, refused: StageOutcome, known: Wish | None = None) -> bool:
        """Whether a request for a budget is met in a process that knows nothing; `known`: by what it is known
        to be."""
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=budget_bytes)
        request = dataclasses.replace(self, record=record, seen=set(), kept=[], looks=0, asked=0)
        request.steering = "trusted"  # what is named is counted
        if known is not None and known in tries.own_kernels(record):
            request._look(known, known=True)  # every request looks at it in the end
        else:
            request.explore(refused)
        self.looks += request.looks
        return bool(request.kept)

    def explore(self, refused: StageOutcome) -> None:
        """Look at what a request looks at, until it is kept; own kernels say what there is as it is."""
        first = self._look(tries.at_once(self.record))
        if first is not None:
            self.paged(self.tuned(self._choice(first)), hlo_of(first))
        alone = bool(self.ways.alone)
        deeper = tries.before_refusal(self.record, refused, self._is_planned_before, alone=alone)
        for asked in chain(tries.as_it_is(self.record), deeper):
            if not self.kept:
                self._look(asked)

    def _least_above(self, nbytes: int) -> Known | None:
        """What needs the least of all that is known to need more."""
        return least_above(MEMORY.of(self.ways.key, self.ways.alone), nbytes)

    def _answered_above(self, nbytes: int) -> int:
        """The least budget above some bytes that was asked for, and kept."""
        return least_answered_above(MEMORY.of(self.ways.key, self.ways.alone), nbytes)

    def _known(self) -> list[Known]:
        """What keeps the budget, cheapest first."""
        known = MEMORY.of(self.ways.key, self.ways.alone)
        return cheapest_first(k for k in known if k.needed_bytes <= self.record.budget_bytes)

    def _try(self, asked: Wish, *, known: bool, than: Choice | None = None) -> Variant | None:
        """The program as it is with a wish, if that keeps the budget; `known`: though it looks seen."""
        variant = self._look(asked, known=known, than=than)
        return variant if variant is not None and tries.keeps(variant, self.record.budget_bytes) else None

    def _look(
        self, asked: Wish, *, known: bool = False, than: Choice | None = None, most_ns: int | None = None
    ) -> Variant | None:
        """The program with a wish, unless it promises no less `than` another, or more than `most_ns`; its
        bytes are known then."""
        plain = self._plain() if asked == relowering.PLAIN else None
        if plain is not None and not self._is_met_by(plain):
            return None
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=asked.budget_bytes)
        self.tell(tries.said_of(asked, self.record.budget_bytes))
        variant = relowering.variant(
            self.ways.program, self._wish(asked), record, scheduled=self.scheduled,
            skip=lambda r: (
                tries.promises_no_less(r, than)
                or tries.promises_more(r, most_ns)
                or (not known and self.is_seen(r, asked))
            ),
        )  # fmt: skip
        if variant is None:
            return None
        self.looks += 1
        self.record = tries.with_own_kernels(self.record, asked, variant)
        variant = dataclasses.replace(variant, record=tries.beside(variant.record, self.record))
        if plain is not None:
            variant = tries.as_counted(variant, plain.memory.total_bytes)
        if self.module is not None:
            fit = in_place_of(variant.module, variant.calls, self.module, self.ways.calls)
            if fit is None:
                return None
            variant = dataclasses.replace(variant, module=fit)
        variant = self.as_packed(asked, variant)
        self.ways.learn(asked, variant)
        if (counted_bytes := MEMORY.counted(self.ways.key, asked)) is not None:
            variant = tries.as_counted(variant, counted_bytes)
        if tries.keeps(variant, self.record.budget_bytes):
            self.kept.append((asked, variant))
        return variant

    def _plain(self) -> Plain | None:
        """The program without `coop.remat`, as XLA counts it; None where it cannot be had."""
        return relowering.plain_program(self.ways.program, self.record.device_name)

    def _is_met_by(self, plain: Plain) -> bool:
        """True if the program without `coop.remat` keeps the budget; what it needs is known afterwards."""
        if self.module is not None and signature(self.module) != plain.signature:
            return False
        if plain.memory.host_bytes > self.record.host_budget_bytes > 0:
            return False
        MEMORY.learn(self.ways.key, tries.known_of_plain(plain, self.record.objective))
        return plain.memory.total_bytes <= self.record.budget_bytes

    def is_seen(self, record: Record, asked: Wish) -> bool:
        """True for a plan that was looked at before, asked for in other words."""
        if record.jaxpr is None:
            return False
        key = plan_key(record, asked), record.budget_bytes
        if key in self.seen:
            return True
        self.seen.add(key)
        return False

    def _is_planned_before(self, asked: Wish) -> bool:
        """True if a wish is planned as something that was looked at; nothing is compiled for the answer."""
        self.tell("planning for as little as can be")
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=asked.budget_bytes)
        planned = relowering.planned(self.ways.program, self._wish(asked), record)
        return planned is not None and (plan_key(planned, asked), planned.budget_bytes) in self.seen

    def _choice(self, variant: Variant) -> Choice:
        """A way with the words of the user's own request."""
        outcome = dataclasses.replace(hlo_of(variant), budget_bytes=self.record.budget_bytes)
        planned = variant.record
        record = dataclasses.replace(self.record, jaxpr=planned.jaxpr, whole=planned.whole, hlo=outcome)
        return Choice(record=record, module=variant.module)
