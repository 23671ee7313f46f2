"""The commands that compile, read or draw: explain, pareto, plan, report, inspect, show, doctor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coop_jax import doctor
from coop_jax.curve import pareto
from coop_jax.difference import difference
from coop_jax.explaining import explain
from coop_jax.inspecting import Opened, SimulatedPoint, inspect, open_path, simulated_curve
from coop_jax.pack import read_text
from coop_jax.plain import compile_plain, report_beside
from coop_jax.planning import compile_within
from coop_jax.programs import NamedProgram, load, of_user
from coop_jax.progress import progress
from coop_jax.report import Report, report
from coop_jax.saving import ENDINGS, TEXTS, Shown, save
from coop_jax.screen import Block, Heading, Lines, Table, as_plain, as_text, print_blocks
from coop_jax.tables import memory_blocks
from coop_jax.text import format_bytes, printable
from passes.checked import InputError, is_whole, json_of, share_of
from passes.cost import DEVICES
from passes.ir import PLAN_FORMAT, PROGRAM_FORMAT, Program
from passes.listing import plan_text, program_text, read_plan
from passes.memory_map import MAP_FORMAT, MemoryMap

_MOST_BUDGETS = 200


def _give(arguments: argparse.Namespace, shown: Any, write: Callable[[Path], None]) -> int:
    """Print something, and write it to `--out`."""
    if arguments.out is not None:
        write(arguments.out)
    if arguments.json:
        sys.stdout.write(json.dumps(shown.to_dict()) + "\n")
    else:
        print_blocks(shown.blocks(), sys.stdout)
    return 0


def _check(arguments: argparse.Namespace, endings: Sequence[str] = ENDINGS) -> None:
    if arguments.out is not None and arguments.out.suffix not in endings:
        raise InputError(f"--out is {str(arguments.out)!r}; it must end in one of {', '.join(endings)}")
    if not 1 <= getattr(arguments, "top", 1) <= 1000:
        raise InputError(f"--top is {arguments.top}; give a number from 1 to 1000")


def _program(arguments: argparse.Namespace) -> tuple[NamedProgram, dict[str, Any]]:
    _check(arguments)
    program = load(arguments.target, arguments.spec)
    wrong = [n for n in arguments.donate if not 0 <= n < len(program.specs)]
    if wrong:
        raise InputError(f"--donate is {wrong[0]}; there are {len(program.specs)} arguments, counted from 0")
    return program, {"device": arguments.device, "donate_argnums": tuple(arguments.donate)}


def _explain(arguments: argparse.Namespace) -> int:
    program, options = _program(arguments)
    with of_user(arguments.target):
        explanation = explain(
            program.function, *program.specs, budgets=not arguments.quick, top=arguments.top, **options
        )
    return _give(arguments, explanation, explanation.save)


def _pareto(arguments: argparse.Namespace) -> int:
    program, options = _program(arguments)
    if not 1 <= arguments.budgets <= _MOST_BUDGETS:
        raise InputError(f"--budgets is {arguments.budgets}; give a number from 1 to {_MOST_BUDGETS}")
    if arguments.rival and arguments.no_rivals:
        raise InputError("--rival names what is compiled beside the budgets, --no-rivals nothing: give one")
    place = arguments.target.rpartition(":")[0]
    named = {name: load(f"{place}:{name}", []).function for name in arguments.rival}
    rivals = named if named or arguments.no_rivals else None
    with of_user(arguments.target):
        curve = pareto(program.function, *program.specs, budgets=arguments.budgets, rivals=rivals, **options)
    return _give(arguments, curve, curve.save)


def _plan(arguments: argparse.Namespace) -> int:
    program, options = _program(arguments)
    drawn = arguments.out is not None and arguments.out.suffix not in (".json", ".txt")
    given = ("host", "planner", "tune", "objective")
    asked = {"budget": _budget(arguments.budget), **{name: getattr(arguments, name) for name in given}}
    if arguments.max_overhead is not None:
        asked["max_overhead"] = share_of(arguments.max_overhead, "--max-overhead")
    plain = None
    with of_user(arguments.target), progress() as tell:
        tell("compiling it within the budget")
        compiled = compile_within(program.function, *program.specs, **asked, **options)
        if drawn:
            tell("compiling the program as it is, for the picture")
            plain = compile_plain(program.function, program.specs, static_argnums=(), kwargs=None, **options)
    if plain is None:
        return _give(arguments, planned := report(compiled), lambda path: save(planned, path))
    shown = report_beside(compiled, plain)

    def write(path: Path) -> None:
        maps = [inspect(plain.compiled), inspect(compiled)]
        save(shown, path, maps=maps, titles=("as it is", "within budget"), budget_bytes=shown.budget_bytes)

    return _give(arguments, shown, write)


def _budget(text: str) -> Any:
    """A budget as Python takes it: plain digits are bytes, a text with a dot alone is a fraction."""
    stripped = text.strip()
    if is_whole(stripped):
        return int(stripped)
    try:
        return float(stripped)
    except ValueError:
        return stripped


def _report(arguments: argparse.Namespace) -> int:
    _check(arguments, TEXTS)
    first = _report_of(arguments.report)
    if arguments.after is not None:
        shown: Any = difference(first, _report_of(arguments.after))
    else:
        shown = _shown_report(first)
    return _give(arguments, shown, lambda path: save(shown, path))


def _report_of(path: Path) -> Mapping[str, Any]:
    data = json_of(read_text(path))
    needed = ("budget_bytes", "compiled_total_bytes", "recomputed", "overhead_ratio")
    if not isinstance(data, Mapping) or any(key not in data for key in needed):
        raise InputError(f"{path} is no report; write one with coop plan ... --out {path.name}")
    try:
        Report.from_dict(data)
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no report of this version: {error}") from error
    return data


def _shown_report(data: Mapping[str, Any]) -> Shown:
    return Shown(found=tuple(Report.from_dict(data).blocks()), fields=data)


def _inspect(arguments: argparse.Namespace) -> int:
    _check(arguments)
    source = arguments.source
    options = {"platform": arguments.platform, "module": arguments.module}
    memory, curve = inspect(source, **options), tuple[SimulatedPoint, ...]()
    if not arguments.quick and not _is_map(source):
        curve = _curve(open_path(source, **options), arguments.device)
    blocks = [*memory_blocks(memory, top=arguments.top), *_curve_blocks(curve)]
    fields = {**memory.to_dict(), "simulated": [dataclasses.asdict(point) for point in curve]}
    shown = Shown(found=tuple(blocks), fields=fields)
    return _give(arguments, shown, lambda path: save(shown, path, maps=[memory], titles=(memory.name,)))


def _is_map(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:1] == b"{"


def _curve(opened: Opened, device: str | None) -> tuple[SimulatedPoint, ...]:
    return simulated_curve(opened, DEVICES[device or opened.assigner.backend.default_device])


def _curve_blocks(curve: tuple[SimulatedPoint, ...]) -> list[Block]:
    if not curve:
        return []
    rows = tuple(
        (format_bytes(p.budget_bytes), f"+{100 * p.overhead_ratio:.1f} %" if p.found else "no plan found")
        for p in curve
    )
    note = (
        "simulated: the program's own kernels, run again; coop.remat plans before XLA fuses, which costs less"
    )
    return [
        Heading(text="what a budget would cost"),
        Table(header=("budget", "recompute"), rows=rows),
        Lines(lines=(note,)),
    ]


def _show(arguments: argparse.Namespace) -> int:
    text = read_text(arguments.file)
    data = json_of(text)
    form = data.get("format") if isinstance(data, Mapping) else None
    if form == PROGRAM_FORMAT:
        shown = program_text(Program.from_json(text))
    elif form == PLAN_FORMAT:
        program = None if arguments.program is None else Program.from_json(read_text(arguments.program))
        shown = plan_text(read_plan(text), program)
    elif form == MAP_FORMAT:
        shown = as_text(memory_blocks(MemoryMap.from_json(text)))
    elif form is None and isinstance(data, Mapping) and "compiled_total_bytes" in data:
        shown = as_text(_shown_report(_report_of(arguments.file)).found)
    elif form is None and isinstance(data, Mapping) and {"stage", "before_temp_bytes"} <= data.keys():
        shown = json.dumps(data, indent=1)  # what a stage says it did, see `passes.dump`
    else:
        known = ", ".join((PROGRAM_FORMAT, PLAN_FORMAT, MAP_FORMAT))
        raise InputError(f"{arguments.file} is none of {known}, and no report")
    shown = "\n".join(map(printable, shown.rstrip("\n").split("\n"))) + "\n"
    sys.stdout.write(as_plain(shown, sys.stdout.encoding))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    checks = doctor.examine()
    if arguments.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in checks]) + "\n")
    else:
        print_blocks(doctor.blocks(checks), sys.stdout)
    return 0 if all(check.good or check.optional for check in checks) else 1


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": _explain,
    "pareto": _pareto,
    "plan": _plan,
    "report": _report,
    "inspect": _inspect,
    "show": _show,
    "doctor": _doctor,
}
