"""What the command line does: `coop solve` plans a program on its own, without XLA; `coop pack` places items.

The words are in `coop_cli`, the commands that compile or draw in `coop_jax.commands`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path

from coop_jax import commands
from coop_jax.budget import parse_bytes
from coop_jax.errors import CoopError, InfeasibleBudgetError
from coop_jax.pack import pack_file, read_text
from coop_jax.progress import on_terminal
from coop_jax.text import format_bytes, printable
from passes.checked import NUMBER, InputError, is_whole, share_of, whole_of
from passes.ir import Plan, Program
from passes.link import LINKS, Link
from passes.liveness import Graph
from passes.objective import Objective
from passes.offsets.placement import place_graph
from passes.planners import PlannerConfig, plan
from passes.planners.placing import end_of
from passes.registry import PLANNERS
from passes.simulate import simulate
from passes.validate import validate

UNITS_PER_SECOND = 200_000
FRACTION = re.compile(r"[01]?\.[0-9]+|[01]\.")


def run(arguments: argparse.Namespace) -> int:
    """Run a parsed command (see `coop_cli`); returns the exit code."""
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        with on_terminal():
            return _COMMANDS[arguments.command](arguments)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        _tell(f"coop {arguments.command}: interrupted")
        return 130
    except InfeasibleBudgetError as error:
        _tell(f"coop {arguments.command}: {printable_lines(str(error))}")
        return 1
    except InputError as error:
        _tell(f"coop {arguments.command}: {_one_line(error)} (docs: errors/input)")
        return 2
    except (CoopError, OSError) as error:
        _tell(f"coop {arguments.command}: {_one_line(error)}")
        return 2


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def printable_lines(text: str) -> str:
    """`text` with what is no character for people written as escapes, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def _one_line(message: object) -> str:
    return printable(" ".join(str(message).split()))


def _print(text: str) -> None:
    """Write to stdout, with escapes for characters that it does not have."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _solve(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    program = _read(arguments.program)
    if arguments.planner == "delta" and not config.host_bytes:
        raise InputError("--planner delta swaps to the host; say how much it may take there with --host")
    if arguments.objective == "energy" and not any(op.energy_pj for op in program.ops):
        raise InputError('--objective is energy, but no op of the program has "energy"')
    before_bytes = simulate(program).peak_bytes
    budget_bytes = parse_budget(arguments.budget, before_bytes)
    made = plan(program, budget_bytes, config)
    validate(program, made, config.link)
    if arguments.out is not None:
        arguments.out.write_text(made.to_json() + "\n", encoding="utf-8")
    limited = arguments.max_overhead is not None
    _print(made.to_json() + "\n" if arguments.json else summary(program, made, before_bytes, limited=limited))
    return 0 if made.status.found else 1


def _config(arguments: argparse.Namespace) -> PlannerConfig:
    config = _with_objective(_planner_config(arguments), arguments)
    if arguments.host is None:
        return config
    if arguments.joint:
        raise InputError("--joint places plans without pages; leave out --host")
    host_bytes = _bytes(arguments.host.strip(), "--host", least=1)
    link = _link(arguments.link.strip())
    return dataclasses.replace(config, planner=arguments.planner, host_bytes=host_bytes, link=link)


def _with_objective(config: PlannerConfig, arguments: argparse.Namespace) -> PlannerConfig:
    text = arguments.max_overhead
    if arguments.objective == "energy" and not PLANNERS[arguments.planner].frugal:
        raise InputError(f"--planner {arguments.planner} knows time only; leave out --objective energy")
    if text is None:
        return dataclasses.replace(config, objective=Objective(least=arguments.objective))
    if arguments.objective != "energy":
        raise InputError("--max-overhead is for --objective energy; the least time has no other limit")
    objective = Objective(least="energy", max_overhead=share_of(text, "--max-overhead"))
    return dataclasses.replace(config, objective=objective)


def _link(text: str) -> Link:
    """A link by its name, or by its GB/s each way."""
    if text in LINKS:
        return LINKS[text]
    rate = float(text) * 1e9 if NUMBER.fullmatch(text) else 0.0
    if not 0 < rate < 1e15:
        raise InputError(f"--link is {reprlib.repr(text)}; give GB/s, or one of {', '.join(LINKS)}")
    return Link(name=f"{text} GB/s", to_host_bytes_per_second=rate, from_host_bytes_per_second=rate)


def _planner_config(arguments: argparse.Namespace) -> PlannerConfig:
    if arguments.planner == "delta":
        return PlannerConfig()
    limit_s = None if arguments.time_limit is None else _seconds(arguments.time_limit)
    if arguments.planner == "exact":
        joint = bool(arguments.joint)
        return PlannerConfig(planner="exact", time_limit_s=limit_s, joint=joint, report=_tell)
    if arguments.joint:
        raise InputError("--joint is for --planner exact; the other planners place their plans anyway")
    work_limit = None if limit_s is None else int(limit_s * UNITS_PER_SECOND)
    strong = arguments.bound == "strong"
    return PlannerConfig(planner=arguments.planner, placed=True, work_limit=work_limit, strong_bound=strong)


def _seconds(text: str) -> float:
    limit_s = float(text) if NUMBER.fullmatch(text.strip()) else 0.0
    if not 0 < limit_s <= 86_400:
        raise InputError(f"--time-limit is {reprlib.repr(text)}; give seconds above 0, at most 86400")
    return limit_s


def _pack(arguments: argparse.Namespace) -> int:
    capacity_bytes = _bytes(arguments.capacity.strip(), "--capacity")
    limit_s = _seconds(arguments.time_limit)
    summary_text, fits = pack_file(arguments.problem, capacity_bytes, limit_s, arguments.out)
    _print(summary_text)
    return 0 if fits else 1


def _read(path: Path) -> Program:
    text = read_text(path)
    try:
        return Program.from_json(text)
    except InputError as error:
        raise InputError(f"{path} is not a program: {error}") from error


def parse_budget(text: str, peak_bytes: int) -> int:
    """Bytes of a budget on the command line.

    Args:
        text: bytes ("1048576", "8GiB"), or a fraction with a dot in (0, 1], such as "0.8".
        peak_bytes: what a fraction is a fraction of.

    Raises:
        InputError, BudgetError: neither; the message shows what is accepted.
    """
    stripped = text.strip()
    if FRACTION.fullmatch(stripped):
        ratio = float(stripped)
        if not 0 < ratio <= 1:
            raise InputError(
                f"--budget is {reprlib.repr(text)}; a fraction of the live peak must be in (0, 1]"
            )
        return int(ratio * peak_bytes)
    return _bytes(stripped, "--budget", least=1)


def _bytes(text: str, what: str, least: int = 0) -> int:
    """Bytes of a text: plain digits, or a size with its unit."""
    return whole_of(text if is_whole(text) else str(parse_bytes(text)), what, least=least)


def summary(program: Program, made: Plan, before_bytes: int, *, limited: bool = False) -> str:
    """What a plan needs and costs, in lines for people; `limited` if its time was."""
    placement_bytes = placed_bytes(program, made)
    fragmentation_ratio = placement_bytes / made.peak_bytes - 1 if made.peak_bytes else 0.0
    share = f"{made.peak_bytes / before_bytes:.3f} of before" if before_bytes else "nothing to plan"
    recompute_ns = sum(program.ops[made.steps[i]].cost_ns for i in made.recomputes()) + made.waiting_ns
    rows = [
        (
            "program",
            f"{printable(program.name) or 'unnamed'}, {len(program.ops)} ops, cost {program.cost_ns}",
        ),
        ("budget", format_bytes(made.budget_bytes)),
        ("peak before", format_bytes(before_bytes)),
        ("peak after", f"{format_bytes(made.peak_bytes)}, {share}"),
        ("placed heap", f"{format_bytes(placement_bytes)}, {fragmentation_ratio:.2%} over the peak"),
        ("overhead", f"{made.overhead_ratio:.3%}, cost {recompute_ns}"),
        ("lower bound", f"{made.lower_bound_ratio:.3%}"),
        ("recomputes", str(len(made.recomputes()))),
        *_host_rows(made),
        *([("energy", f"{made.energy_pj} pJ")] if made.energy_pj else []),
        ("planner", made.planner),
        ("status", _status(made, limited)),
        ("seconds", f"{made.seconds:.3f}"),
    ]
    return "".join(f"{name:<12} {value}\n" for name, value in rows)


def _host_rows(made: Plan) -> list[tuple[str, str]]:
    """What a plan does with the host, if it may."""
    if not made.host_budget_bytes:
        return []
    room = f"{format_bytes(made.host_peak_bytes)} of {format_bytes(made.host_budget_bytes)}"
    return [("pages", f"{len(made.pages)}, on the host {room}, waiting {made.waiting_ns}")]


def placed_bytes(program: Program, made: Plan) -> int:
    """The end of the highest live range: at the plan's offsets, or at best fit's if that ends lower."""
    graph = Graph.of(program)
    best_fit_bytes = place_graph(graph, made.steps, None, made.pages).heap_bytes
    if not made.offsets:
        return best_fit_bytes
    back = [o + graph.nbytes[page.buffer] for page, o in zip(made.pages, made.page_offsets, strict=True)]
    return min(best_fit_bytes, max([end_of(graph, made), *back]))


def _status(made: Plan, limited: bool) -> str:
    if limited and not made.status.found and made.peak_bytes <= made.budget_bytes:
        return "unknown: no plan found within the limit of time; the one shown is the quickest found"
    return {
        "optimal": "optimal (proved)",
        "feasible": "feasible",
        "infeasible": "infeasible (proved); the plan shown has the lowest peak that was found",
        "unknown": "unknown: no plan found within the budget; the one shown has the lowest peak found",
    }[made.status.value]


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "solve": _solve,
    "pack": _pack,
    **commands.COMMANDS,
}
