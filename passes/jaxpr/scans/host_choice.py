"""Which stacks of scans the planner sends to the host, and how long the program waits for them.

A stack on the host saves all of its bytes and costs its time on the link. On the way out a slice has its
iteration to leave in, beside the kernels; on the way in it is brought in the iteration that reads it, mostly
at its beginning, so that all of that time is waited for. Every byte takes the link for the same time: the
fewest bytes that are enough are the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.lift import inner_work
from passes.jaxpr.scans.host_stacks import Key, Stack, stacks_of, with_stacks_on_host
from passes.outcome import Paged

# A stack that is this much smaller than all together saves next to nothing for its copies' latency.
SMALL_RATIO = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A program with stacks on the host.

    Attributes:
        program: open jaxpr.
        paged: what waits there.
        waiting_ns: estimated time that kernels stand still for the link.
        energy_pj: estimated energy of what the link carries.
        excess_bytes: by how much the program is over what it may need; 0 or less for one that fits.
    """

    program: Jaxpr
    paged: tuple[Paged, ...]
    waiting_ns: int
    energy_pj: int
    excess_bytes: int


def sent_to_host(
    jaxpr: Jaxpr, device: DeviceModel, host_bytes: int, excess_of: Callable[[Jaxpr], int]
) -> Sent | None:
    """The program with as few bytes on the host as make it fit, else with all that the host has room for.

    Args:
        jaxpr: open, its scans rewritten.
        host_bytes: what may wait on the host.
        excess_of: by how much an open jaxpr is over what it may need.

    Returns:
        None where nothing can be sent.
    """
    link = device.host_link
    if link is None:
        return None
    stacks = stacks_of(jaxpr)
    least_bytes = SMALL_RATIO * sum(s.nbytes for s in stacks)
    largest_first = sorted((s for s in stacks if s.nbytes >= least_bytes), key=lambda s: (-s.nbytes, s.key))
    possible = _within(largest_first, host_bytes)
    if not possible:
        return None

    def sent(chosen: Sequence[Stack]) -> Sent:
        program, paged = with_stacks_on_host(jaxpr, {s.key for s in chosen})
        return Sent(
            program=program, paged=paged, waiting_ns=waiting_for_stacks_ns(chosen, device),
            energy_pj=round(link.picojoules_per_byte * sum(map(_moved_bytes, chosen))),
            excess_bytes=excess_of(program),
        )  # fmt: skip

    low, high, best = 1, len(possible), sent(possible)
    if best.excess_bytes > 0:
        return best
    while low < high:
        middle = (low + high) // 2
        if (trial := sent(possible[:middle])).excess_bytes > 0:
            low = middle + 1
        else:
            high, best = middle, trial
    smaller = [s for s in possible[low:] if s.nbytes < possible[low - 1].nbytes]
    for last in reversed(smaller):  # the last one may be larger than it need be
        if (trial := sent([*possible[: low - 1], last])).excess_bytes <= 0:
            return trial
    return best


def _within(stacks: Sequence[Stack], host_bytes: int) -> list[Stack]:
    """As many of the stacks, in their order, as the host has room for."""
    within: list[Stack] = []
    for stack in stacks:
        if stack.nbytes <= host_bytes:
            host_bytes -= stack.nbytes
            within.append(stack)
    return within


def _moved_bytes(stack: Stack) -> int:
    """What the link carries for a stack, both ways."""
    return stack.iterations * (1 + len(stack.readers)) * stack.nbytes


def waiting_for_stacks_ns(stacks: Sequence[Stack], device: DeviceModel) -> int:
    """Estimated time that kernels stand still for the slices of stacks."""
    link = device.host_link
    assert link is not None, "nothing waits on the host without a link"
    out_ns: dict[Key, int] = {}
    waiting_ns = 0
    for stack in stacks:
        length = max(1, int(stack.maker.params["length"]))
        slice_bytes = stack.nbytes // length
        place = stack.key[:-1]
        out_ns[place] = out_ns.get(place, 0) + link.to_host_ns(slice_bytes)
        waiting_ns += stack.iterations * length * len(stack.readers) * link.from_host_ns(slice_bytes)
    makers = {stack.key[:-1]: stack for stack in stacks}
    for place, takes_ns in out_ns.items():
        scan = makers[place].maker
        (body,) = compat.inner_jaxprs(scan)
        body_ns = inner_work(body, device, compat.scan_sizes(scan)).cost_ns
        iterations = makers[place].iterations * int(scan.params["length"])
        waiting_ns += iterations * max(0, takes_ns - body_ns)
    return waiting_ns
