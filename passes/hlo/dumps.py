"""Scheduled modules as XLA writes them out: with `xla_dump_to`, as an HloProto, or inside an executable.

A dump holds one module after another, each at several stages; the one after optimizations is what runs.
Beside a module's text XLA writes where it put every value, as text, too; a proto holds both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.checked import InputError
from passes.hlo import proto, wire
from passes.hlo.xla_assignment import Address, Assignment, Name

_MODULE_FIELD, _ASSIGNMENT_FIELD = 1, 3
_STAGE = re.compile(r"[^.]+\..+\.(?P<target>\w[\w.]*?)_after_optimizations\.(?:txt|hlo\.pb|hlo)$")
_ALLOCATION = re.compile(r"allocation (?P<index>\d+): size (?P<size>\d+)(?P<rest>.*)")
_VALUE = re.compile(r"\s+value: <\d+ (?P<name>[^@<>{} ]+)(?:\{(?P<at>[\d,]*)\})? @\d+> "
                    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\)")  # fmt: skip
_NO_TEMP = ("parameter", "constant", "thread-local", "maybe-live-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedModule:
    """A module in a dump.

    Attributes:
        path: the file.
        name: of the module, such as "jit_step".
        platform: "cpu" or "cuda"; None if the file's name does not tell.
    """

    path: Path
    name: str
    platform: str | None


def dumped_modules(folder: Path) -> list[DumpedModule]:
    """The modules after optimizations in a folder that XLA dumped to, in the order of their names.

    Raises:
        InputError: there is none.
    """
    modules = [m for path in sorted(folder.iterdir()) if (m := module_of_path(path)).platform is not None]
    if not modules:
        raise InputError(
            f"{folder} holds no module after optimizations; write one with "
            "XLA_FLAGS='--xla_dump_to=FOLDER --xla_dump_hlo_as_proto'"
        )
    return modules


def module_of_path(path: Path) -> DumpedModule:
    """What a file's name tells."""
    match = _STAGE.fullmatch(path.name)
    if match is None:
        return DumpedModule(path=path, name=path.stem, platform=None)
    platform = "cpu" if match["target"].endswith("cpu") else "cuda"
    parts = path.name.split(".")
    return DumpedModule(path=path, name=parts[1], platform=platform)


def read_proto(data: bytes) -> tuple[Any, bytes | None]:
    """The module of a serialized HloProto or HloModuleProto, and the assignment that came with it.

    Raises:
        InputError: it is neither, or a module without instructions.
    """
    for reading in _readings(data):
        if reading[0].computations and reading[0].entry_computation_id:
            return reading
    raise InputError("this is neither a serialized HloProto nor a serialized HloModuleProto")


def _readings(data: bytes) -> Iterator[tuple[Any, bytes | None]]:
    with suppress(ValueError):
        parts = dict(wire.contents(data))
        if _MODULE_FIELD in parts:
            yield proto.parse(parts[_MODULE_FIELD]), parts.get(_ASSIGNMENT_FIELD)
    with suppress(ValueError):
        yield proto.parse(data), None


def assignment_text_of(path: Path) -> str | None:
    """The text that XLA wrote beside a module's about where it put its values; None if there is none."""
    beside = path.with_name(f"{path.stem}-buffer-assignment.txt")
    return beside.read_text(encoding="utf-8") if path.suffix == ".txt" and beside.is_file() else None


def read_assignment_text(text: str) -> Assignment:
    """The addresses in a buffer assignment's text."""
    addresses: dict[Name, Address] = {}
    temps: dict[int, int] = {}
    index, is_temp = -1, False
    for line in text.splitlines():
        if (match := _ALLOCATION.match(line)) is not None:
            index = int(match["index"])
            is_temp = not any(word in match["rest"] for word in _NO_TEMP)
            if is_temp:
                temps[index] = int(match["size"])
        elif (match := _VALUE.match(line)) is not None:
            at = tuple(int(i) for i in (match["at"] or "").split(",") if i)
            addresses[match["name"], at] = Address(
                allocation=index, offset=int(match["offset"]), nbytes=int(match["size"]), is_temp=is_temp
            )
    return Assignment(addresses=addresses, temp_bytes=sum(temps.values()))
