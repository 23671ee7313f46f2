"""What the jaxpr stage is asked for: sizes of a program on its device, or on each of several, and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coop_jax.module import ModuleFacts
from coop_jax.record import UNLIMITED_BYTES
from coop_jax.relowering import Wish
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.shards import enter, parts_of
from passes.objective import Objective
from passes.outcome import StageOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Where a program runs, and its arguments and results on each device.

    Of what is between them in a program that XLA partitions only the whole's sizes are known before XLA has
    split it. It is taken to be split as all arguments together are, as what a split batch and a split weight
    make is; the enforcing stage sees the real sizes. Inside `shard_map` the sizes are one device's.

    Attributes:
        parts: one device's bytes times this are the bytes that are planned.
        num_devices: over how many devices.
        fresh: on one device the positions of results whose storage no argument gives.
        partitioned: False on one device, and where the program is one `shard_map`, whose body is not
            partitioned.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    parts: int
    num_devices: int
    partitioned: bool
    fresh: frozenset[int] = frozenset()

    @property
    def several(self) -> bool:
        """True if it is more than one."""
        return self.num_devices > 1


def devices_of(facts: ModuleFacts, plain: ClosedJaxpr | None) -> Devices:
    """Where a program runs.

    Args:
        plain: the closed jaxpr that is to be planned, calls inlined; None if that was done.
    """
    argument_parts, output_parts = _parts(facts, plain)
    arguments = [n // p for n, p in zip(facts.device_argument_nbytes, argument_parts, strict=True)]
    outputs = [n // p for n, p in zip(facts.device_output_nbytes, output_parts, strict=True)]
    partitioned = facts.num_devices > 1 and (plain is None or enter(plain) is None)
    return Devices(
        argument_bytes=sum(arguments),
        output_bytes=sum(outputs) + facts.table_bytes,
        alias_bytes=sum(arguments[i] for i in facts.donated),
        parts=facts.finest_parts if partitioned else 1,
        num_devices=facts.num_devices,
        partitioned=partitioned,
        fresh=_fresh(facts, plain),
    )


def _fresh(facts: ModuleFacts, plain: ClosedJaxpr | None) -> frozenset[int]:
    """The results that have storage of their own, where those of `plain` are the program's."""
    if plain is None or facts.num_devices > 1:
        return frozenset()
    if tuple(map(compat.aval_nbytes, plain.out_avals)) != facts.device_output_nbytes:
        return frozenset()
    return frozenset(range(len(plain.out_avals))) - {facts.aliased[i] for i in facts.donated}


def _parts(facts: ModuleFacts, plain: ClosedJaxpr | None) -> tuple[Sequence[int], Sequence[int]]:
    """Into how many parts arguments and results are split, also where only a `shard_map` says so."""
    if plain is None or facts.num_devices == 1:
        return facts.argument_parts, facts.output_parts
    found = []
    own = zip(parts_of(plain), (plain.in_avals, plain.out_avals), strict=True)
    said = ((facts.argument_nbytes, facts.argument_parts), (facts.output_nbytes, facts.output_parts))
    for (split, avals), (nbytes, parts) in zip(own, said, strict=True):
        same = tuple(map(compat.aval_nbytes, avals)) == nbytes
        found.append(list(map(max, split, parts)) if same else parts)
    return found[0], found[1]


def request_of(
    devices: Devices,
    budget_bytes: int,
    device: DeviceModel,
    planner: str,
    objective: Objective,
    baseline_total_bytes: int | None = None,
) -> JaxprRequest:
    """A request for a budget per device."""
    return JaxprRequest(
        budget_bytes=devices.parts * budget_bytes,
        argument_bytes=devices.parts * devices.argument_bytes,
        output_bytes=devices.parts * devices.output_bytes,
        alias_bytes=devices.parts * devices.alias_bytes,
        device=dataclasses.replace(device, partitioned=devices.partitioned),
        planner=planner,
        objective=objective,
        baseline_total_bytes=baseline_total_bytes,
        parts=devices.parts,
        fresh=devices.fresh,
    )


def unlimited(request: JaxprRequest) -> JaxprRequest:
    """The request without a limit."""
    return dataclasses.replace(request, budget_bytes=UNLIMITED_BYTES)


def as_wished(
    request: JaxprRequest, asked: Wish | None, unplanned: Callable[[], StageOutcome], parts: int = 1
) -> JaxprRequest:
    """The request with what is wished for, if anything is, in the place of the user's budget.

    Args:
        unplanned: what the jaxpr stage says of the function without a plan.
        parts: how many devices' bytes the request is of.
    """
    if asked is None:
        return request
    if asked.temp_ratio is not None:
        aim_bytes = request.fixed_bytes + max(1, int(asked.temp_ratio * unplanned().before_temp_bytes))
    else:
        aim_bytes = parts * (asked.aim_bytes or asked.budget_bytes)
    calibration = asked.calibration.of_parts(parts)
    return dataclasses.replace(request, budget_bytes=aim_bytes, calibration=calibration, policy=asked.policy)
