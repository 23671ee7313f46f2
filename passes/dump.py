"""What a stage made of a program, written to a folder: for looking, with `COOP_DUMP_TO=folder` set.

Every stage of every program gets a folder of its own, numbered in the order of their ends. Nothing is made
or written if the variable is not set.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "COOP_DUMP_TO"


def dump(stage: str, files: Mapping[str, Callable[[], str | bytes]]) -> Path | None:
    """Write files about one stage of one program.

    Args:
        stage: such as "jaxpr" or "hlo".
        files: name -> what gives its contents, called only if something is written.

    Returns:
        The folder, None if nothing was asked for.

    Raises:
        OSError: the folder cannot be written to; names the variable.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    try:
        folder = _new_folder(Path(wanted), stage)
    except OSError as error:
        raise type(error)(
            error.errno, f"{VARIABLE} names no folder to write to: {error.strerror}", wanted
        ) from error
    for name, contents in files.items():
        made = contents()
        data = made.encode() if isinstance(made, str) else made
        (folder / name).write_bytes(data)
    return folder


def _new_folder(parent: Path, stage: str) -> Path:
    """A folder with the next number, which no other thread or process has."""
    parent.mkdir(parents=True, exist_ok=True)
    first = 1 + sum(1 for _ in parent.iterdir())
    for n in itertools.count(first):
        try:
            (folder := parent / f"{n:04}-{stage}").mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")
