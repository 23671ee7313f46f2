"""The command line: `coop COMMAND ...`. Only words are here; what a command needs is imported when it runs.

Exit codes: 0 done, 1 none is known (no plan, no packing, something is missing), 2 bad input, in one line.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

DEVICES = ("h200", "h100", "a100", "b200", "v4", "v5e", "v5p", "v6e", "tpu7x")
SLICE = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):\d+(x\d+){1,2}")
PLANNER_HELP = "auto (default), exact to prove the optimum (OR-Tools), or one of %(choices)s"
EXAMPLES = """examples:
  coop explain train.py:step --spec params --spec 'f32[64,1024]' --device h200
  coop pareto train.py:step --spec params --spec batch --device h200 --out curve.svg
  coop plan train.py:step --spec params --spec batch --budget 8GiB --device h200 --out report.html
  coop inspect /tmp/xla_dump --out memory.html
"""


class _Planners:
    """The planners' names, looked up when they are asked for and no sooner."""

    def __iter__(self) -> Iterator[str]:
        from passes.registry import PLANNERS

        return iter(PLANNERS)

    def __contains__(self, name: str) -> bool:
        return name in tuple(self)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    _choose_platform(arguments)
    from coop_jax.cli import run

    return run(arguments)


def _choose_platform(arguments: argparse.Namespace) -> None:
    """Before JAX is imported: a device that is not here needs no other one started."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if getattr(arguments, "device", None) is not None or arguments.command in ("inspect", "show", "report"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(str(message).split())
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Prints the version when it is asked for, and looks it up no sooner."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(nargs=0, **kwargs)  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            version = metadata.version("coop-jax")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        parser.exit(0, f"coop {version}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="coop", epilog=EXAMPLES,
        description="A byte budget for a JAX program: see where memory goes, and plan within it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, help_text, add in _COMMANDS:
        add(commands.add_parser(name, help=help_text, description=help_text))
    return parser


def _path(text: str) -> Path:
    if "\0" in text:
        raise argparse.ArgumentTypeError("a path has no zero bytes")
    return Path(text)


def _output_path(text: str) -> Path:
    path = _path(text)
    if not path.parent.is_dir():  # what takes minutes is not to be lost at the end
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} to")
    return path


def _device(text: str) -> str:
    name = text.lower()
    if name in DEVICES or SLICE.fullmatch(name):
        return name
    known = ", ".join(DEVICES)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}, nor a slice of TPUs such as v6e:2x4")


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="train.py:step, or package.module:step")
    command.add_argument(
        "--spec", action="append", default=[], metavar="SPEC",
        help='one for each argument: a shape such as "f32[64,1024]", or a name in the module (a pytree, or a '
        "function without arguments that gives one)",
    )  # fmt: skip
    command.add_argument(
        "--device", type=_device, metavar="DEVICE",
        help="compile for this GPU or TPU, here or not (default: as JAX); over a slice such as v6e:2x4 "
        "what --spec names is spread as its shardings say, and each device is held to the budget",
    )  # fmt: skip
    command.add_argument(
        "--donate",
        action="append",
        default=[],
        type=int,
        metavar="N",
        help="argument N is donated, as in jax.jit",
    )
    _add_output(command, "a file: .png, .svg, .html, .json or .txt")


def _add_output(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--out", type=_output_path, metavar="FILE", help=f"write to {what}")


def _add_top(command: argparse.ArgumentParser) -> None:
    command.add_argument("--top", type=int, default=8, metavar="K", help="rows of each table (default 8)")


def _add_explain(command: argparse.ArgumentParser) -> None:
    _add_target(command)
    _add_top(command)
    command.add_argument("--quick", action="store_true", help="compile it once, and try no budget")


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_target(command)
    command.add_argument(
        "--budget", required=True, help='bytes, "8GiB", "85%%" of the device, or 0.5 of the plain peak'
    )
    command.add_argument(
        "--host", metavar="BYTES", help='how much may wait in the host\'s memory, such as "64GiB"'
    )
    command.add_argument("--planner", default="auto", choices=_Planners(), metavar="NAME", help=PLANNER_HELP)
    command.add_argument(
        "--tune", type=int, default=0, metavar="N", help="run the N cheapest plans here, and take the fastest"
    )
    _add_objective(command)


def _add_objective(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--objective", default="time", choices=("time", "energy"),
        help="the least time (default), or the least energy where it is known what the kernels take",
    )  # fmt: skip
    command.add_argument(
        "--max-overhead", metavar="SHARE", help="with --objective energy: how much slower, such as 0.1"
    )


def _add_pareto(command: argparse.ArgumentParser) -> None:
    _add_target(command)
    command.add_argument("--budgets", type=int, default=12, metavar="N", help="how many (default 12)")
    command.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="NAME",
        help="another function of the module, beside it (default: its layers under jax.checkpoint, where it "
        "has some)",
    )
    command.add_argument("--no-rivals", action="store_true", help="compile nothing but the budgets")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("report", type=_path, metavar="REPORT.json", help="what coop plan --out wrote")
    command.add_argument(
        "after", type=_path, nargs="?", metavar="AFTER.json", help="what changed from one to the other"
    )
    _add_output(command, "a file: .html, .json or .txt")


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source", type=_path, metavar="FILE|DUMP_DIR",
        help="a folder that XLA dumped to, a module in one, a serialized module or executable, or a map",
    )  # fmt: skip
    command.add_argument("--module", metavar="NAME", help="which module of a folder (default: the largest)")
    command.add_argument(
        "--platform", choices=("cpu", "cuda"), help="whose rules; most files tell themselves"
    )
    command.add_argument("--device", choices=DEVICES, help="whose costs (default: of the platform)")
    command.add_argument("--quick", action="store_true", help="do not simulate what budgets would cost")
    _add_top(command)
    _add_output(command, "a file: .png, .svg, .html, .json or .txt")


def _add_show(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=_path, metavar="FILE", help="a program, plan, report or map in JSON")
    command.add_argument(
        "--program", type=_path, metavar="PROGRAM.json", help="of a plan: names and live bytes"
    )


def _add_solve(command: argparse.ArgumentParser) -> None:
    command.add_argument("program", type=_path, metavar="PROGRAM.json", help="in the coop-program/1 format")
    command.add_argument(
        "--budget",
        required=True,
        help='bytes, such as 1048576 or "8GiB", or a fraction of the live peak, such as 0.8',
    )
    command.add_argument("--planner", default="auto", choices=_Planners(), metavar="NAME", help=PLANNER_HELP)
    command.add_argument(
        "--time-limit", metavar="S",
        help="about how many seconds to search (a work limit: the plan does not depend on the machine; "
        "with --planner exact real seconds: the best plan so far is kept)",
    )  # fmt: skip
    command.add_argument(
        "--joint", action="store_true",
        help="with --planner exact: place the plan, too, so that it fits without fragmentation",
    )  # fmt: skip
    command.add_argument(
        "--bound", default="cut", choices=("cut", "strong"),
        help="the lower bound: cut (default), or strong: by a linear program, in seconds",
    )  # fmt: skip
    command.add_argument(
        "--host", metavar="BYTES", help='also send values to the host, at most so many, such as "64GiB"'
    )
    command.add_argument(
        "--link", default="pcie5", metavar="NAME|GB/S",
        help="what carries them: pcie3, pcie4, pcie5 (default), c2c, tpu-v5e, tpu-v6e, or GB/s each way",
    )  # fmt: skip
    _add_objective(command)
    _add_output(command, "PLAN.json")


def _add_pack(command: argparse.ArgumentParser) -> None:
    command.add_argument("problem", type=_path, metavar="PROBLEM.csv", help="columns id, lower, upper, size")
    command.add_argument("--capacity", required=True, help='bytes, such as 1048576 or "1MiB"')
    command.add_argument("--time-limit", metavar="S", default="60", help="seconds (default 60)")
    command.add_argument(
        "--out", type=_output_path, metavar="FILE", help="write the problem with offsets here"
    )


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("explain", "say where a program's memory goes, and what could be had", _add_explain),
    ("pareto", "say what budgets cost, over their whole range", _add_pareto),
    ("plan", "compile a program within a budget, and report", _add_plan),
    ("report", "print a saved report, or what changed between two", _add_report),
    ("inspect", "say where the memory of a dumped program goes", _add_inspect),
    ("show", "print a program or a plan as text", _add_show),
    ("solve", "plan a program in JSON for a byte budget, without XLA", _add_solve),
    ("pack", "place items with fixed lifetimes in so many bytes", _add_pack),
    ("doctor", "say what is installed, what works, and what is missing", _add_doctor),
)
