"""What is read from outside is checked here, value by value, so that nothing behind has to doubt it.

Sizes, costs, times and their sums stay below `MOST`, where they are exact as doubles and where the
planners' and OR-Tools' 64-bit sums hold them.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MOST = 2**53
_MOST_DIGITS = 40
_WHOLE = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class InputError(ValueError):
    """What a user wrote, in a file or as an option, is not accepted; a sentence says why."""


def json_of(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        InputError: not JSON; NaN or infinite; nested deeper, or an integer longer, than can be read.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON: {error}") from None
    except RecursionError:
        raise InputError("its brackets are nested too deeply") from None
    except ValueError:
        raise InputError(f"it has an integer of thousands of digits; {_range()}") from None


def whole(value: object, what: str) -> int:
    """A number from 0 to below `MOST`; one with a fraction of zero is taken, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected an integer")
    if not 0 <= value < MOST:
        raise InputError(f"{what} is {reprlib.repr(value)}; {_range()}")
    return value


def check_types(cls: type, values: Mapping[str, object]) -> None:
    """See that values are what a dataclass says of its fields: numbers, texts, truth values, None, dicts of
    them; what else it says is not looked at.

    Raises:
        TypeError: one is not; names the field.
    """
    for name, hint in get_type_hints(cls).items():
        if name in values and not _is_of(values[name], hint):
            raise TypeError(f"{name} is {reprlib.repr(values[name])}")


def _is_of(value: object, hint: Any) -> bool:
    if hint in (int, float, str):
        return isinstance(value, (int, float) if hint is float else hint) and not isinstance(value, bool)
    if hint is bool or hint is type(None):
        return isinstance(value, hint)
    if get_origin(hint) is UnionType:
        return any(_is_of(value, one) for one in get_args(hint))
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is_of(v, get_args(hint)[1]) for v in value.values())
    return True


def share_of(text: str, what: str) -> float:
    """The finite number, not below 0, that a text is."""
    if not NUMBER.fullmatch(text.strip()) or float(text) == float("inf"):
        raise InputError(f"{what} is {reprlib.repr(text)}; give a share of the time, such as 0.1")
    return float(text)


def whole_of(text: str, what: str, *, least: int = 0) -> int:
    """The integer that a text is, in plain digits, from `least` to below `MOST`."""
    stripped = text.strip()
    if not _WHOLE.fullmatch(stripped):
        raise InputError(f"{what} is {reprlib.repr(text)}, expected an integer")
    if len(stripped) > _MOST_DIGITS or not least <= int(stripped) < MOST:
        raise InputError(f"{what} is {reprlib.repr(stripped)}; {_range(least)}")
    return int(stripped)


def is_whole(text: str) -> bool:
    """True for a text of plain digits."""
    return text.isascii() and text.isdigit()


def listed(value: object, what: str) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected a list")
    return value


def mapped(value: object, what: str, needed: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """A JSON object that has some keys."""
    if not isinstance(value, Mapping):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected an object")
    missing = [key for key in needed if key not in value]
    if missing:
        raise InputError(f"{what} has no {', '.join(missing)}")
    return value


def worded(value: object, what: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected a text")
    return value


def flag(value: object, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected true or false")
    return value


def check_total(total: int, what: str) -> None:
    """Refuse a sum that is too large."""
    if total >= MOST:
        raise InputError(f"{what} are {total} together; {_range()}")


def _no_number(name: str) -> Any:
    raise InputError(f"it has {name}, which is no number")


def _range(least: int = 0) -> str:
    low = "0" if least == 0 else "-(2**53 - 1)" if least == 1 - MOST else str(least)
    return f"numbers and their sums must be from {low} to 2**53 - 1 = {MOST - 1}"
