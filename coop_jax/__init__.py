"""A byte budget for a whole JAX program: this file is the list of what users import.

import coop_jax as coop

@jax.jit
@coop.remat(budget="8GiB")
def train_step(state, batch): ...
"""

from pathlib import Path

from coop_jax.advice import BudgetRange, Donation
from coop_jax.budget import Budget, parse_bytes
from coop_jax.curve import Pareto, pareto
from coop_jax.difference import Difference, difference
from coop_jax.drawing import draw
from coop_jax.errors import (
    ArgumentError,
    BudgetError,
    BudgetExceededError,
    ConstraintError,
    CoopError,
    InfeasibleBudgetError,
    UnsupportedError,
)
from coop_jax.explaining import Explanation, explain
from coop_jax.inspecting import inspect
from coop_jax.on_host import on_host
from coop_jax.pinning import pin
from coop_jax.planning import MinimumBudget, minimum_budget, plan
from coop_jax.points import ParetoPoint, Rival
from coop_jax.remat import remat
from coop_jax.report import Report, report
from coop_jax.stream import streamed
from passes.jaxpr import compat
from passes.memory_map import MemoryMap

__all__ = [
    "ArgumentError",
    "Budget",
    "BudgetError",
    "BudgetExceededError",
    "BudgetRange",
    "ConstraintError",
    "CoopError",
    "Difference",
    "Donation",
    "Explanation",
    "InfeasibleBudgetError",
    "MemoryMap",
    "MinimumBudget",
    "Pareto",
    "ParetoPoint",
    "Report",
    "Rival",
    "UnsupportedError",
    "difference",
    "draw",
    "explain",
    "inspect",
    "minimum_budget",
    "on_host",
    "pareto",
    "parse_bytes",
    "pin",
    "plan",
    "remat",
    "report",
    "streamed",
]

compat.hide_lines(Path(__file__).parent)
compat.hide_lines(Path(__file__).parent.parent / "coop_cli")
