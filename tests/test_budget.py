"""Every accepted form of a budget, and every refused one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coop_jax.budget import Budget, parse_bytes
from coop_jax.errors import BudgetError
from coop_jax.text import format_bytes, format_ns, format_table

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (8 * GIB, 8 * GIB),
        (np.int64(12), 12),
        ("1 B", 1),
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        (" 8GiB ", 8 * GIB),
        ("8 GB", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 3 * GIB // 2),
        (".5 GiB", GIB // 2),
        ("0.1 GB", 10**8),
        ("300 kB", 300_000),
        ("300 KB", 300_000),
        ("300 KiB", 300 * 1024),
        ("512MiB", 512 * 2**20),
        ("2 TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("0.3 KiB", 307),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert Budget.of(text).resolve() == nbytes


NONSENSE = [
    "8g", "8G", "8 gib", "8Gb", "8", "", " ", "GiB", "-8GiB", "+8GiB", "8e9", "8e9 B", "0 GiB", "0B",
    "1,5 GiB", "8 GiB 3", "nan", "inf", "nan GiB", "0%", "-5%", "101%", "100.1%", "%", "85", "٨ GiB", "0.4 B",
    0, -1, -(2**40), 0.0, -0.5, 1.5, 100.0, float("nan"), float("inf"), -float("inf"),
    True, False, [], (), {}, b"8GiB", 1j, object, np.float32(1.5), np.bool_(True),
]  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_nonsense_is_refused_by_a_message_that_shows_what_is_accepted(value: object) -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.of(value)
    text = str(caught.value)
    assert repr(value) in text
    for accepted in ('"8GiB"', '"7.5 GB"', '"85%"', "(0, 1]", "None", "coop.Budget", "10**9", "2**30"):
        assert accepted in text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", ["85%", 0.5, None])
def test_only_sizes_are_sizes(value: object) -> None:
    with pytest.raises(BudgetError):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "device", "expected"),
    [
        ("85%", 1000, 850),
        ("100%", 1000, 1000),
        ("0.1%", 10_000, 10),
        (None, 1000, 900),
        (Budget(), 1000, 900),
        (Budget(headroom=0), 1000, 1000),
        (Budget(headroom="25%"), 1000, 750),
        (Budget(headroom=1), 1000, 999),
        (Budget(device="1 kB", headroom="10%"), 2000, 800),
        (Budget(device="1 kB"), None, 1000),
        (Budget(device="50%", headroom="100 B"), 1000, 400),
        ("85%", 999, 849),
    ],
)
def test_shares_of_the_device(value: object, device: int | None, expected: int) -> None:
    budget = Budget.of(value)
    assert budget.needs_device == (device is not None)
    assert budget.resolve(device_bytes=device) == expected


def test_a_fraction_asks_for_the_plain_program_once() -> None:
    asked = []

    def baseline() -> int:
        asked.append(1)
        return 1001

    budget = Budget.of(0.5)
    assert not budget.needs_device
    assert budget.resolve(baseline_bytes=baseline) == 500
    assert len(asked) == 1
    assert Budget.of(1.0).resolve(baseline_bytes=lambda: 7) == 7
    assert Budget.of(np.float32(0.5)).resolve(baseline_bytes=lambda: 8) == 4
    Budget.of("8GiB").resolve(baseline_bytes=baseline)
    assert len(asked) == 1


def test_what_is_missing_is_named() -> None:
    with pytest.raises(BudgetError, match="memory of this device is not known"):
        Budget.of(None).resolve()
    with pytest.raises(BudgetError, match="peak without rematerialization"):
        Budget.of(0.5).resolve(device_bytes=10**9)
    with pytest.raises(BudgetError, match="leave nothing"):
        Budget(device=100, headroom=100).resolve()


@pytest.mark.parametrize("host", [0.5, -1, "8g", "85%", True])
def test_host_memory_is_bytes(host: object) -> None:
    assert Budget(host="8GiB").host_bytes == 8 << 30
    with pytest.raises(BudgetError):
        Budget(host=host)  # type: ignore[arg-type]


@pytest.mark.parametrize("headroom", [0.5, -1, "8g", True])
def test_headroom_is_bytes_or_a_share(headroom: object) -> None:
    with pytest.raises(BudgetError):
        Budget(headroom=headroom)  # type: ignore[arg-type]


def test_budgets_are_values() -> None:
    budget = Budget(device="8GiB", headroom="10%")
    assert Budget.of(budget) is budget
    assert budget == Budget(device="8GiB", headroom="10%")
    assert budget.to_dict() == {"device": "8GiB", "host": None, "headroom": "10%"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.device = 1  # type: ignore[misc]


def test_budgets_print_their_bytes() -> None:
    assert str(Budget.of("8 GB")) == "7.45 GiB (8000000000 B)"
    assert str(Budget.of("85%")) == "85% of the device's memory"
    assert str(Budget.of(None)) == "the device's memory less 10% of the device's memory"
    assert str(Budget(device="1KiB", headroom=24)) == "1.00 KiB (1024 B) less 24 B"
    assert str(Budget.of(0.5)) == "0.5 of the plain program's peak"


@given(st.integers(min_value=1, max_value=2**60))
def test_printed_bytes_are_exact_and_parse_again(nbytes: int) -> None:
    text = format_bytes(nbytes)
    exact = text[text.index("(") + 1 : -1] if "(" in text else text
    assert parse_bytes(exact) == nbytes
    if "(" in text:
        rounded = parse_bytes(text[: text.index("(")]) if "PiB" not in text else nbytes
        assert abs(rounded - nbytes) <= 0.006 * nbytes


def test_numbers_for_people() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(-2048) == "-2.00 KiB (-2048 B)"
    assert format_bytes(1741234567) == "1.62 GiB (1741234567 B)"
    assert format_bytes(1741234567, exact=False) == "1.62 GiB"
    assert [format_ns(n) for n in (7, 1500, 12_345_678, 2 * 10**9)] == ["7 ns", "1.5 us", "12.3 ms", "2 s"]


def test_tables_are_aligned() -> None:
    lines = format_table(("name", "n"), [("a", "10"), ("longer", "7")]).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "|--------|----:|"
    with pytest.raises(AssertionError):
        format_table(("a", "b"), [("only one",)])


def test_a_fraction_of_headroom_is_refused_by_its_name() -> None:
    with pytest.raises(BudgetError, match=r"headroom 0\.1 is refused"):
        Budget(device=0.8, headroom=0.1)


def test_every_amount_is_refused_by_its_name_and_with_what_is_accepted_there() -> None:
    with pytest.raises(
        BudgetError, match=r"host '50%' is refused: .*\(8_000_000_000\); a size with [^;]*; GiB[^;]*$"
    ):
        Budget(device="1GiB", host="50%")
    with pytest.raises(BudgetError, match="size '85%' is refused"):
        parse_bytes("85%")
    for huge in (10**400, -(10**400)):
        with pytest.raises(BudgetError, match="is refused"):
            Budget.of(huge)
    with pytest.raises(BudgetError, match="of the plain program's peak: 0 bytes"):
        Budget.of(0.5).resolve(baseline_bytes=lambda: 0)
