"""Plans for more than the budget that XLA's own count says keep it.

On a TPU passes that follow XLA's callback move values to the chip's memory. So XLA counts less than is
predicted: 1030 MiB of a scanned GPT's 1136, since it moves all of its logits. Held to the prediction it is
planned deeper than it need be, for 65 % more cycles. How much is moved nobody knows before it is done. So
where a plan for as much more as that memory holds is much cheaper, it is compiled to the end, once; before a
refusal a few are, each for as much less as the one before it was over.

The count of one plan says nothing certain of another. So a refusal does not name what was only counted. But
what it names is counted, too: each copy to that memory has a tuple's table, and where the values of the peak
are too large for it, XLA counts more than is predicted: 1.9 MB of 17.4 GiB of a Llama on a v5p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from coop_jax import tries
from coop_jax.known import Known
from coop_jax.record import Record, with_hlo
from coop_jax.registry import Choice
from coop_jax.relowering import Variant, Wish
from coop_jax.tries import TRIES, hlo_of, price_of
from passes.ir import Status


def by_count(
    record: Record,
    made: Choice,
    *,
    look: Callable[[Wish], Variant | None],
    count: Callable[[Wish, Variant], Variant],
) -> Variant | None:
    """What keeps a budget by XLA's count, and costs much less than what is predicted to keep it.

    Args:
        record: of the request.
        made: what is taken otherwise, or the refusal.
        look: compiles a way as far as XLA's schedule; None if it cannot be had, or was looked at before.
        count: the same way with XLA's count of it, as far as it can be had.
    """
    more_bytes = tries.backend_of(record).fast_bytes
    if not more_bytes or (hlo_of(made).status.found and not made.record.is_changed):
        return None
    larger_bytes = record.budget_bytes + more_bytes
    aim_bytes, left = larger_bytes, 1 if hlo_of(made).status.found else TRIES.most_counted_if_refused
    while left:
        following_bytes = record.budget_bytes
        asked = Wish(budget_bytes=larger_bytes, aim_bytes=aim_bytes, whole=record.whole)
        found = look(asked)
        if found is not None and hlo_of(found).status.found:
            if not _is_worth_it(found, made):
                return None
            predicted_bytes = hlo_of(found).planned_total_bytes
            counted = found if predicted_bytes <= record.budget_bytes else count(asked, found)
            over_bytes = hlo_of(counted).planned_total_bytes - record.budget_bytes
            if over_bytes <= 0:
                return counted
            # XLA moves about as many bytes of a plan for so much less.
            following_bytes = max(following_bytes, min(aim_bytes, predicted_bytes) - over_bytes)
            left -= 1
        if aim_bytes <= record.budget_bytes:
            break
        aim_bytes = following_bytes
    return None


def _is_worth_it(found: Variant, made: Choice) -> bool:
    """True if nothing else keeps the budget, or only what is much dearer."""
    is_refused = not hlo_of(made).status.found
    return is_refused or tries.is_cheaper(price_of(found), price_of(made), TRIES.counted_ratio)


def count_the_least(
    record: Record,
    least: Callable[[], Known | None],
    *,
    look: Callable[..., Variant | None],
    count: Callable[[Wish, Variant], Variant],
) -> None:
    """Ask for XLA's count of what a refusal would name, until that was counted.

    Args:
        least: what needs the least of what is known.
        record, look, count: as in `by_count`.
    """
    left, before = TRIES.most_counted if tries.backend_of(record).fast_bytes else 0, None
    while left:
        known = least()
        if known is None or known == before or known.counted_bytes is not None or known.wish.plain:
            return
        found, before = look(known.wish, known=True), known
        if found is None:
            return
        if hlo_of(found).status.found:  # else it is forgotten: XLA does not pack as it was steered to
            count(known.wish, found)
            left -= 1


def is_steered(record: Record, way: Choice | Variant) -> bool:
    """True if a way keeps its budget only where XLA's packing is steered, and may be packed otherwise.

    What is moved to the chip's memory changes the holes that buffers were made for.
    """
    hlo, moves = hlo_of(way), tries.backend_of(record).fast_bytes > 0
    return moves and hlo.status.found and hlo.unsteered_bytes is not None


def unsteered[W: (Choice, Variant)](way: W) -> W:
    """The refusal of a way whose steered packing does not hold."""
    hlo = hlo_of(way)
    refused = dataclasses.replace(
        hlo, changed=False, status=Status.UNKNOWN, planned_temp_bytes=hlo.before_temp_bytes,
        recompute_ns=0, recompute_pj=0, recomputed=(), paged=(), least_total_bytes=hlo.unsteered_bytes,
    )  # fmt: skip
    return dataclasses.replace(way, record=with_hlo(way.record, refused))
