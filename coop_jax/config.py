"""What a user asks of one decorated function."""

from __future__ import annotations

from dataclasses import dataclass, field

from coop_jax.budget import Budget
from passes.hlo.enforce import OnFragmentation
from passes.jaxpr.values import Constraints
from passes.objective import LEAST_TIME, Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class RematConfig:
    """What the user asked of one decorated function.

    Attributes:
        budget: see `coop_jax.budget`.
        planner: one of `passes.planners.config.PLANNERS`.
        device: name of a cost model; None takes that of the device that is compiled for.
        name: the function's name, for people.
        pin, on_fragmentation: see `coop_jax.remat`.
        constraints: what was asked about single values.
        objective: what is least.
        tune: how many candidates are run to see which is fastest; 0 for none.
        derived: True for a derivative of what was planned already, which may use random keys again.
        apart: True under a derivative outside `jit`, where JAX runs forward and backward as programs of their
            own.
    """

    budget: Budget
    planner: str = "auto"
    device: str | None = None
    name: str = ""
    pin: bool = False
    on_fragmentation: OnFragmentation = "recompute"
    constraints: Constraints = field(default_factory=Constraints)
    objective: Objective = LEAST_TIME
    tune: int = 0
    derived: bool = False
    apart: bool = False
