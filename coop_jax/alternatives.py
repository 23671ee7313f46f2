"""Other ways to write a program, where the enforcing stage finds none, or a dearer one than is known.

A plan that is asked for fewer bytes is not always a smaller program, and a budget that is met says nothing
about a larger one: the planners are not monotone. The promise is, by four rules:

1. **A plan that costs more than it promised** is not trusted: where the program's own kernels, some of them
   recomputed, are expected to take less, they are looked at, too. What they cost is exact. So they are where
   it promised much more than is expected of them (a sum over Gaussian splats at half: +10 %, not +74). And
   where XLA counts less than is predicted, its count is asked for (`coop_jax.counting`).
2. **Before a budget is refused** the program is tried as it is without `coop.remat`, with the jaxpr stage
   aiming at every one of `TRIES.ratios` of its temporaries that may do, with its own kernels planned, and on
   a TPU with rounded values, and smaller kernels. These do not depend on the budget, and what the enforcing
   stage is held to is the budget itself: a larger one tries all that a smaller one does.
3. **What was met in this process is remembered**, by program. It is taken again for a larger budget for which
   nothing else is found, or what costs more; and a refusal names what is met when it is asked for in
   a process that remembers nothing.
4. **Pages that keep a budget** are compared with what a request without the host's memory takes: all that
   it looks at is looked at, so that host memory makes no program dearer, and refuses none.

Before all of that the whole program is planned, where only functions inside of it are decorated and their
plans do not keep the budget by themselves, or were made for values that are split over devices since: they
know neither each other, nor a loop around them, nor an optimizer, nor the devices.

Each try is a compile as far as XLA's schedule. The scheduled module of the one that is taken goes on in the
place of the first: it was made of the same function, with the same arguments, results and donation.

**All of that takes no longer than the compile itself**, once something keeps the budget: what is left then is
a matter of cost. A clock would let the load of a machine choose the plan, and the processes of one job choose
different ones; so tries are counted, and `Backend.looks` of them take as long as one compile. Not counted are
the search while nothing keeps the budget, which is then below the least that is known; the one try of what
rule 3 knows to be cheaper; rule 4; and the compiles on a TPU that ask for XLA's count. The planners' own
work is bounded by counts, too (`passes.planners.candidate.WorkLimit`, `passes.jaxpr.straight.CONFIG`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable
from dataclasses import dataclass

from coop_jax import relowering, tries, tuning
from coop_jax.looks import Search
from coop_jax.progress import progress
from coop_jax.record import Record, with_hlo
from coop_jax.registry import Choice
from coop_jax.tries import hlo_of, rank
from coop_jax.verdict import named
from coop_jax.ways import Ways
from passes.jaxpr import compat
from passes.outcome import StageOutcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherWays(Ways):
    """The alternatives of one program (see `coop_jax.registry.Alternatives`).

    Attributes:
        settings: of JAX when it was lowered; with others it would be another program.
    """

    settings: Hashable

    def choose(self, record: Record, outcome: StageOutcome, module: bytes) -> Choice:
        """What to take, when the enforcing stage has said `outcome` of the scheduled `module`."""
        begin = time.perf_counter()
        with progress() as tell:
            search = Search(ways=self, record=record, module=module, tell=tell)
            choice = self._chosen(search, outcome)
        seconds = outcome.seconds + time.perf_counter() - begin
        hlo = dataclasses.replace(hlo_of(choice), seconds=seconds, looks=search.looks, limited=search.limited)
        record = tries.beside(with_hlo(choice.record, hlo), search.record)
        return dataclasses.replace(choice, record=record)

    def _chosen(self, search: Search, outcome: StageOutcome) -> Choice:
        record = search.record
        first = Choice(record=with_hlo(record, outcome))
        if relowering.wish() is not None or self.settings != self.program.inside(compat.trace_context):
            return first
        first = search.as_one(search.as_packed(tries.at_once(record), first))
        best = search.cheapest(first)
        best = min(best, search.otherwise or best, key=rank)
        if hlo_of(best).paged:
            best = min(search.without_host() or best, best, key=rank)
        is_timed = record.tune and hlo_of(best).status.found and best.record.is_changed
        return self._fastest(search, best) if is_timed else best

    def _fastest(self, search: Search, best: Choice) -> Choice:
        """The fastest of the `tune` cheapest ways that keep the budget; `best` is one of them."""
        most = search.record.tune
        tuning.refuse_what_acts(tuple(self.program.jaxpr.effects), self.calls)
        if best.module is None:
            search.look(tries.at_once(search.record), known=True)
        for asked in (*tries.own_kernels(search.record), *tries.deeper(search.record, hlo_of(best))):
            if len(tries.distinct(search.kept)) < most:
                search.look(asked)
        found = sorted(tries.distinct(search.kept), key=lambda way: rank(way[1]))[:most]
        search.tell(f"running {len(found)} programs")
        timed = tries.timed(self.program, found)
        order = sorted(range(len(found)), key=lambda k: (timed[k].run_ns, k))
        taken = search.choice(found[order[0]][1])
        record = dataclasses.replace(taken.record, timed=tuple(timed[k] for k in order))
        return dataclasses.replace(taken, record=record)

    def refusal(self, record: Record, outcome: StageOutcome) -> StageOutcome:
        """What to say of a budget that arguments and results exceed, before the program is compiled.

        What the least may be is asked with the least that leaves anything at all for temporaries.
        """
        record = dataclasses.replace(record, whole=self.program.as_one is not None)
        with progress() as tell:
            search = Search(ways=self, record=record, tell=tell)
            search.is_met(outcome, outcome.fixed_bytes + 1)
            least_bytes = search.find_the_least(outcome, lower=False)
        return named(dataclasses.replace(outcome, least_total_bytes=None), record.budget_bytes, least_bytes)
