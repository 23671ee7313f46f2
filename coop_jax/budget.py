"""Byte sizes and budgets: what a user may write, and what it means in bytes.

A budget is the peak device memory, per device, of the compiled XLA program that contains the
decorated function: arguments + outputs + temporaries - aliased.

    8_000_000_000          bytes
    "8GiB", "7.5 GB"       bytes (GiB is binary, GB is decimal)
    "85%"                  of the device's memory
    0.5                    of the same program's peak without rematerialization
    None                   the device's memory less headroom
    Budget(device=..., host=..., headroom=...)

`host` is how much may wait in the host's memory (paging), in bytes; without it nothing does.

Nothing here imports jax: the device's memory and the plain program's peak are passed in.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from coop_jax.errors import BudgetError
from coop_jax.text import format_bytes

DEFAULT_HEADROOM = "10%"

_SIZES = (
    'bytes as an integer (8_000_000_000); a size with its unit ("8GiB", "7.5 GB", "512 MiB", "300 kB"; '
    "GiB is 2**30, GB is 10**9 bytes)"
)
_SHARES = 'a share of the device\'s memory ("85%")'
_ACCEPTED = {
    "size": _SIZES,
    "host": _SIZES,
    "headroom": f"{_SIZES}; {_SHARES}; None",
    "budget": f"{_SIZES}; {_SHARES}; a float in (0, 1], the fraction of the same program's peak without "
    "rematerialization (0.5); None, the device's memory less headroom; or coop.Budget(device=..., host=..., "
    "headroom=...)",
}
_SCALE = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_MOST_DIGITS = 30
_SHORT = reprlib.Repr(maxstring=80, maxlong=80, maxother=80)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)\s*", re.ASCII)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*", re.ASCII)


def parse_bytes(value: int | str) -> int:
    """A size in bytes, from an integer or from a text with a unit.

    Args:
        value: a positive integer, or a text such as "8GiB" (binary) or "8 GB" (decimal).

    Returns:
        The size in bytes; a fraction of a byte is dropped.

    Raises:
        BudgetError: anything else.
    """
    return _bytes(value, "size")


def _bytes(value: object, name: str) -> int:
    amount = _parse(value, name)
    if amount.unit != "bytes":
        raise _refuse(value, "a size in bytes is needed here", name)
    return int(amount.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much memory a program may use.

    Attributes:
        device: bytes, "8GiB", "85%" of the device's memory, a float in (0, 1] (that fraction of the
            program's peak without rematerialization), or None: all of the device's memory.
        host: bytes, or "64GiB", of the host's memory in which values may wait; None for no paging.
        headroom: bytes, "512MiB" or "10%" of the device's memory, taken off. None means 10 % of the
            device's memory where `device` is None, else nothing.
    """

    device: int | str | float | None = None
    host: int | str | None = None
    headroom: int | str | None = None

    def __post_init__(self) -> None:
        if self.host is not None:
            _bytes(self.host, "host")
        if self.device is not None:
            _parse(self.device)
        if self.headroom is None or _is_zero(self.headroom):
            return
        if _parse(self.headroom, "headroom").unit == "fraction":
            raise _refuse(self.headroom, "a fraction of the program's peak is no headroom", "headroom")

    @classmethod
    def of(cls, value: Any, host: int | str | None = None) -> Budget:
        """The budget that a user's `value` means, with what may wait on the host.

        Raises:
            BudgetError: `value` is none of the accepted forms, or says something else of the host.
        """
        budget = value if isinstance(value, Budget) else cls(device=value)
        if host is None:
            return budget
        if budget.host is not None:
            raise BudgetError(f"host={host!r}, but the budget says host={budget.host!r}: give it once.")
        return dataclasses.replace(budget, host=host)

    @property
    def host_bytes(self) -> int:
        """Bytes that may wait on the host; 0 for no paging."""
        return 0 if self.host is None else parse_bytes(self.host)

    @property
    def needs_device(self) -> bool:
        """True if `resolve` must know the device's memory."""
        return self.device is None or any(
            _parse(v).unit == "percent"
            for v in (self.device, self.headroom)
            if v is not None and not _is_zero(v)
        )

    @property
    def needs_baseline(self) -> bool:
        """True if `resolve` must know what the program needs without rematerialization."""
        return self.device is not None and _parse(self.device).unit == "fraction"

    def resolve(
        self, *, device_bytes: int | None = None, baseline_bytes: Callable[[], int] | None = None
    ) -> int:
        """This budget in bytes.

        Args:
            device_bytes: the device's memory; None if it is not known.
            baseline_bytes: returns the total of the same program without rematerialization. Called at
                most once, and only if this budget is a fraction of it.

        Raises:
            BudgetError: what is needed is not known, or headroom leaves nothing.
        """
        if self.needs_device and device_bytes is None:
            raise BudgetError(
                f"budget {self}: the memory of this device is not known, so a share of it means nothing. "
                'Give bytes, such as "8GiB", or a fraction of the plain program\'s peak, such as 0.5.'
            )
        total = device_bytes or 0
        asked = total if self.device is None else _resolve(_parse(self.device), total, baseline_bytes)
        headroom = self._headroom()
        off = 0 if headroom is None else _resolve(headroom, total, None)
        if asked - off <= 0:
            less = (
                f"{format_bytes(off)} of headroom leave nothing of {format_bytes(asked)}"
                if off
                else "0 bytes"
            )
            raise BudgetError(f"budget {self}: {less}.")
        return asked - off

    def _headroom(self) -> _Amount | None:
        """What is left free; None for nothing."""
        default = DEFAULT_HEADROOM if self.device is None else 0
        headroom = default if self.headroom is None else self.headroom
        return None if _is_zero(headroom) else _parse(headroom)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as given."""
        return {"device": self.device, "host": self.host, "headroom": self.headroom}

    def __str__(self) -> str:
        device = "the device's memory" if self.device is None else _describe(_parse(self.device))
        if (headroom := self._headroom()) is not None:
            device = f"{device} less {_describe(headroom)}"
        return f"{device}, and {format_bytes(self.host_bytes)} on the host" if self.host_bytes else device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Amount:
    """A parsed amount: bytes, percent of the device, or fraction of the plain program."""

    unit: Literal["bytes", "percent", "fraction"]
    value: float | int


def _parse(value: object, name: str = "budget") -> _Amount:
    if isinstance(value, str):
        return _parse_text(value, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(value, f"a {type(value).__name__} is not a {name}", name)
    if value <= 0:
        raise _refuse(value, f"a {name} must be more than zero bytes", name)
    if isinstance(value, numbers.Integral):
        if value >= 10**_MOST_DIGITS:
            raise _refuse(value, f"a size has at most {_MOST_DIGITS} digits", name)
        return _Amount(unit="bytes", value=int(value))
    fraction = float(value)
    if math.isnan(fraction) or not 0.0 < fraction <= 1.0:
        raise _refuse(value, "a float must be in (0, 1]; bytes are integers", name)
    return _Amount(unit="fraction", value=fraction)


def _parse_text(text: str, name: str) -> _Amount:
    if match := _PERCENT.fullmatch(text):
        percent = float(match[1])
        if not 0.0 < percent <= 100.0:
            raise _refuse(text, "a share of the device's memory must be in (0 %, 100 %]", name)
        return _Amount(unit="percent", value=percent)
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _SCALE:
        raise _refuse(text, "this is not a size with a unit", name)
    if len(match[1]) > _MOST_DIGITS:
        raise _refuse(text, f"a size has at most {_MOST_DIGITS} digits", name)
    whole, _, part = match[1].partition(".")
    scale = _SCALE[match[2]]
    nbytes = int(whole or "0") * scale + (int(part) * scale // 10 ** len(part) if part else 0)
    if nbytes <= 0:
        raise _refuse(text, f"a {name} must be more than zero bytes", name)
    return _Amount(unit="bytes", value=nbytes)


def _resolve(amount: _Amount, device_bytes: int, baseline_bytes: Callable[[], int] | None) -> int:
    if amount.unit == "bytes":
        return int(amount.value)
    if amount.unit == "percent":
        return math.floor(device_bytes * amount.value / 100)
    if baseline_bytes is None:
        raise BudgetError(
            f"budget {amount.value!r} is a fraction of the program's peak without rematerialization, which "
            'is not known here. Give bytes, such as "8GiB".'
        )
    return math.floor(baseline_bytes() * amount.value)


def _is_zero(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value == 0


def _describe(amount: _Amount) -> str:
    if amount.unit == "bytes":
        return format_bytes(int(amount.value))
    if amount.unit == "percent":
        return f"{amount.value:g}% of the device's memory"
    return f"{amount.value:g} of the plain program's peak"


def _refuse(value: object, why: str, name: str) -> BudgetError:
    return BudgetError(f"{name} {_SHORT.repr(value)} is refused: {why}. Accepted are: {_ACCEPTED[name]}.")
