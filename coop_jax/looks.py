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

from coop_jax import counting, least, relowering, tries
from coop_jax.known import Known, is_answer
from coop_jax.least import Missed
from coop_jax.record import UNLIMITED_BYTES, Record, with_hlo
from coop_jax.registry import Choice
from coop_jax.relowering import Plain, Variant, Wish
from coop_jax.replacing import in_place_of, signature
from coop_jax.tries import TRIES, hlo_of, is_cheaper, plan_key, price_of, rank
from coop_jax.verdict import named
from coop_jax.ways import Ways
from passes.jaxpr.calibration import UNCALIBRATED
from passes.outcome import StageOutcome


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
        missed: what missed the budget, or a smaller one.
        names: True for a request that is made for the least: what missed a smaller budget is not looked at.
        met: True once such a request met its budget by that.
        otherwise: what keeps the budget by plans of decorated functions, where the whole is looked for.
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
    missed: Missed = field(default_factory=Missed)
    names: bool = False
    met: bool = False
    otherwise: Choice | None = None

    def cheapest(self, first: Choice) -> Choice:
        """The cheapest way that is found, given what XLA made of the first; else the refusal."""
        first_wish = tries.at_once(self.record)
        self.is_seen(self.record, first_wish)
        if self.module is not None and not hlo_of(first).status.found:
            made = Variant(record=first.record, module=self.module, calls=self.ways.calls)
            self.missed.add(first_wish, plan_key(first.record, first_wish), made)
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
        """The whole program planned, where the plans of the functions in it do not keep the budget alone, or
        were made for what is split since: for far fewer bytes than there are.

        What is looked at afterwards is of the whole, too, as often as where the whole is decorated.
        """
        if self.ways.program.as_one is None or (tries.is_as_planned(first) and not first.record.unsplit):
            return first
        whole = dataclasses.replace(self.record, whole=True)
        variant = self.look(tries.at_once(whole))
        if variant is None or (hlo_of(variant).status.found and rank(variant) >= rank(first)):
            return first
        # A later plan may keep the budget; what was there first is taken where none does, or none costs less.
        self.otherwise = first if hlo_of(first).status.found else None
        self.record = dataclasses.replace(whole, jaxpr=variant.record.jaxpr)
        return self.choice(variant)

    def tuned(self, first: Choice) -> Choice:
        """The best of the plans that follow one from the other from what XLA made of the first, and of the
        blocks under a ready policy, where these promise less.

        Best is what keeps the budget at the least estimated time of its kernels, else what comes nearest.
        """
        by_hand = tries.by_hand(self.record, first)
        best = self._followed(first, None if by_hand is None else by_hand[1])
        if (by_hand := tries.by_hand(self.record, best)) is not None:
            variant = self._in_time(best, partial(self.look, by_hand[0]))
            if variant is not None and rank(variant) < rank(best):
                return self.choice(variant)
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
            variant = self._in_time(best, partial(self.look, asked, than=best, most_ns=most_ns))
            if variant is None:
                break
            planned, verdict = variant.record.jaxpr, hlo_of(variant)
            if rank(variant) < rank(best):
                best = self.choice(variant)
        return best

    def paged(self, best: Choice, first: StageOutcome) -> Choice:
        """What is known, or the first program that is better in which less is recomputed, and pages do the
        rest; these looks leave as many to those that follow as a request without host memory has."""
        asked_before = self.asked
        for asked in tries.less_recomputed(self.record, first):
            variant = self._in_time(best, partial(self.look, asked))
            if variant is not None and rank(variant) < rank(best):
                best = self.choice(variant)
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
            missed=Missed(), otherwise=None,
        )  # fmt: skip
        first = alone.look(tries.at_once(alone.record))
        found = None if first is None else alone.cheapest(alone.choice(first))
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
        return self.choice(variant)

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
                return self.choice(variant)
        return None

    def by_count(self, made: Choice) -> Choice | None:
        """What keeps the budget by XLA's count alone, where what is predicted to keep it costs much more."""
        found = counting.by_count(self.record, made, look=self.look, count=self._counted)
        return None if found is None else self.choice(found)

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
        if (known_bytes := self.ways.counted(asked)) is not None:
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
        self.ways.forget(asked)
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
        found = self._first(self._by_itself()) or self.by_count(met or first)
        deeper = tries.before_refusal(self.record, refused, self._deepest)
        found = found or self._first(deeper, than=met)
        least_bytes = None
        if met is None and found is None and self.otherwise is not None:
            return self.otherwise
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
        return next(map(self.choice, filter(None, tried)), None)

    def find_the_least(self, refused: StageOutcome, *, lower: bool = True) -> int | None:
        """What a refusal should name: what is met when it is asked for, by XLA's count, too; `lower` as in
        `least.find`, None where nothing is named."""
        if not least.is_named():
            return None
        if (named_bytes := self.ways.named_above(self.record.budget_bytes)) is not None:
            return named_bytes
        met_bytes, refused_bytes = least.find(
            self.record.budget_bytes, refused, least_above=self.ways.least_above,
            answered_above=self.ways.answered_above, is_met=partial(self.is_met, refused), lower=lower,
        )  # fmt: skip
        counting.count_the_least(
            self.record, lambda: self.ways.least_above(refused_bytes), look=self.look, count=self._counted
        )
        known = self.ways.least_above(refused_bytes)
        if met_bytes is None:
            return None if known is None else known.sure_bytes
        least_bytes = met_bytes if known is None else max(met_bytes, known.counted_bytes or 0)
        if lower:
            self.ways.name(least_bytes)
        return least_bytes

    def is_met(self, refused: StageOutcome, budget_bytes: int, known: Known | None = None) -> bool:
        """Whether a request for a budget is met in a process that knows nothing; `known`: by what it is known
        to be."""
        if self.missed.meets(budget_bytes):
            return True
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=budget_bytes)
        request = dataclasses.replace(self, record=record, seen=set(), kept=[], looks=0, asked=0, names=True)
        request.steering = "trusted"  # what is named is counted
        if known is not None and known.sure_bytes <= budget_bytes and least.is_of_no_budget(known.wish):
            request.look(known.wish, known=True)  # every request looks at it in the end
        if not request.is_answered:
            request.explore(refused)
        self.looks += request.looks
        return request.is_answered

    @property
    def is_answered(self) -> bool:
        """True once something keeps the budget of a request that is made for the least."""
        return bool(self.kept) or self.met

    def explore(self, refused: StageOutcome) -> None:
        """Look at what a request looks at, until it is kept; own kernels say what there is as it is."""
        first = self.look(tries.at_once(self.record))
        if first is not None:
            self.paged(self.tuned(self.choice(first)), hlo_of(first))
        alone = bool(self.ways.alone)
        deeper = tries.before_refusal(self.record, refused, self._deepest, alone=alone)
        for asked in chain(self._by_itself(), deeper):
            if self.is_answered:
                return
            self.look(asked)

    def _known(self) -> list[Known]:
        """What keeps the budget, cheapest first."""
        return self.ways.known_within(self.record.budget_bytes)

    def _try(self, asked: Wish, *, known: bool, than: Choice | None = None) -> Variant | None:
        """The program as it is with a wish, if that keeps the budget; `known`: though it looks seen."""
        variant = self.look(asked, known=known, than=than)
        return variant if variant is not None and tries.keeps(variant, self.record.budget_bytes) else None

    def look(
        self, asked: Wish, *, known: bool = False, than: Choice | None = None, most_ns: int | None = None
    ) -> Variant | None:
        """The program with a wish, unless it promises no less `than` another, or more than `most_ns`; its
        bytes are known then."""
        plain = self._plain() if asked == relowering.PLAIN else None
        if plain is not None and not self._is_met_by(plain):
            return None
        if self.names and (before := self.missed.of(asked)) is not None:
            return self._as_before(before)
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=asked.budget_bytes)
        self.tell(tries.said_of(asked, self.record.budget_bytes))
        missed: list[Variant] = []
        variant = relowering.variant(
            self.ways.program, self._wish(asked), record, scheduled=self.scheduled,
            skip=lambda r: (
                tries.promises_no_less(r, than)
                or tries.promises_more(r, most_ns)
                or (not known and self.is_seen(r, asked))
                or self._missed_before(r, asked, missed)
            ),
        )  # fmt: skip
        if missed:
            return self._as_before(missed[0])
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
        if (counted_bytes := self.ways.counted(asked)) is not None:
            variant = tries.as_counted(variant, counted_bytes)
        if tries.keeps(variant, self.record.budget_bytes):
            self.kept.append((asked, variant))
        elif not hlo_of(variant).status.found:
            self.missed.add(asked, plan_key(variant.record, asked), variant)
        return variant

    def _missed_before(self, planned: Record, asked: Wish, found: list[Variant]) -> bool:
        """True where a request for the least comes to a plan that missed a smaller budget; it is `found`."""
        before = self.missed.by_plan.get(plan_key(planned, asked)) if self.names else None
        found += filter(None, [before])
        return before is not None

    def _as_before(self, missed: Variant) -> Variant | None:
        """What missed a smaller budget, if it misses this one."""
        self.met = self.met or least.is_met_by(missed, self.record.budget_bytes)
        return None if self.met else missed

    def _by_itself(self) -> list[Wish]:
        """The program without `coop.remat`, unless XLA's schedule of it shows that it needs more."""
        by_itself = tries.as_it_is(self.record)
        if by_itself and not tries.backend_of(self.record).fast_bytes:
            needed_bytes = relowering.foreseen_bytes(self.ways.program, self.record, self.scheduled)
            by_itself = by_itself if needed_bytes <= self.record.budget_bytes else []
        return by_itself

    def _plain(self) -> Plain | None:
        """The program without `coop.remat`, as XLA counts it; None where it cannot be had."""
        return relowering.plain_program(self.ways.program, self.record.device_name)

    def _is_met_by(self, plain: Plain) -> bool:
        """True if the program without `coop.remat` keeps the budget; what it needs is known afterwards."""
        if self.module is not None and signature(self.module) != plain.signature:
            return False
        if plain.memory.host_bytes > self.record.host_budget_bytes > 0:
            return False
        self.ways.learn_plain(plain, self.record.objective)
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

    def _deepest(self, asked: Wish) -> tuple[Record | None, bool]:
        """What a wish for as little as can be is planned as, and whether that was looked at; nothing is
        compiled for the answer."""
        self.tell("planning for as little as can be")
        record = dataclasses.replace(self.record, jaxpr=None, budget_bytes=asked.budget_bytes)
        planned = relowering.planned(self.ways.program, self._wish(asked), record)
        if planned is None:
            return None, False
        plan = plan_key(planned, asked)
        if (missed := self.missed.by_plan.get(plan)) is not None:
            self.missed.add(asked, plan, missed)
        return planned, (plan, planned.budget_bytes) in self.seen

    def choice(self, variant: Variant) -> Choice:
        """A way with the words of the user's own request."""
        outcome = dataclasses.replace(hlo_of(variant), budget_bytes=self.record.budget_bytes)
        planned = variant.record
        record = dataclasses.replace(self.record, jaxpr=planned.jaxpr, whole=planned.whole, hlo=outcome)
        return Choice(record=record, module=variant.module)
