"""Planners: a program and a byte budget in, a plan out."""

from passes.planners.bounds import cut_bound, working_set_bytes
from passes.planners.config import PlannerConfig
from passes.planners.dispatch import frontier, least_peak, plan, planner_of
from passes.planners.strategies import LAST_RESORTS

__all__ = [
    "LAST_RESORTS",
    "PlannerConfig",
    "cut_bound",
    "frontier",
    "least_peak",
    "plan",
    "planner_of",
    "working_set_bytes",
]
