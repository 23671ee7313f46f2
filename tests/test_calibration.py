"""What follows from what XLA made of a plan: how the next one is asked for."""

from __future__ import annotations

from dataclasses import replace

from passes.ir import Status
from passes.jaxpr.calibration import (
    CONFIG,
    UNCALIBRATED,
    Calibration,
    Trial,
)
from passes.outcome import StageOutcome
from passes.recipe import Recipe, Scans

PLANNED = StageOutcome(
    stage="jaxpr",
    changed=True,
    budget_bytes=1000,
    argument_bytes=0,
    output_bytes=0,
    alias_bytes=0,
    before_temp_bytes=4000,
    planned_temp_bytes=1000,
    cost_ns=100,
    recompute_ns=0,
    lower_bound_ratio=0.0,
    status=Status.FEASIBLE,
    recipe=Recipe(recompute="auto"),
    seconds=0.0,
)

ALONE, SEGMENTS = Recipe(scans=Scans.LEVELS), Recipe(scans=Scans.SEGMENTS)
SCANS = replace(ALONE, recompute="auto")


def needing(nbytes: int, *, found: bool = False, repair_ns: int = 0) -> StageOutcome:
    """A verdict: XLA made `nbytes` of temporaries of a plan."""
    status = Status.FEASIBLE if found or nbytes <= 1000 else Status.UNKNOWN
    return replace(PLANNED, stage="hlo", before_temp_bytes=nbytes, recompute_ns=repair_ns, status=status)


def test_holes_count_from_then_on_where_an_estimate_with_them_is_nearer() -> None:
    with_holes = UNCALIBRATED.after(replace(PLANNED, holes_bytes=300), needing(1200))
    assert with_holes == Calibration(holes=True)
    assert with_holes.bytes_ratio == 1
    following = with_holes.after(replace(PLANNED, planned_temp_bytes=990), needing(1100))
    assert following is not None
    assert following.holes
    assert following.bytes_ratio > 1
    without = UNCALIBRATED.after(replace(PLANNED, holes_bytes=500), needing(1200))
    assert without is not None
    assert not without.holes
    assert without.bytes_ratio > 1


def test_a_plan_that_fits_or_is_repaired_cheaply_has_no_successor() -> None:
    cheap_ns = int(CONFIG.cheap_repair_ratio * PLANNED.cost_ns)
    assert UNCALIBRATED.after(PLANNED, needing(900)) is None
    assert UNCALIBRATED.after(PLANNED, needing(1100, found=True, repair_ns=cheap_ns)) is None
    assert UNCALIBRATED.after(PLANNED, needing(1100, found=True, repair_ns=cheap_ns + 1)) is not None


def test_a_loop_plan_without_a_rival_has_no_successor_unless_xla_makes_far_less_of_it() -> None:
    loop = replace(PLANNED, recipe=SCANS)
    assert UNCALIBRATED.after(loop, needing(900)) is not None
    assert UNCALIBRATED.after(replace(loop, unrivalled=True), needing(900)) is None
    assert UNCALIBRATED.after(replace(loop, unrivalled=True), needing(800)) is not None
    assert UNCALIBRATED.after(replace(loop, unrivalled=True), needing(1200)) is not None


def test_loops_that_were_not_rewritten_are_planned_once_more_where_the_program_had_to_be_repaired() -> None:
    as_it_is = replace(PLANNED, changed=False)
    repaired = replace(needing(1100, found=True), changed=True)
    assert UNCALIBRATED.after(as_it_is, repaired) is not None
    assert UNCALIBRATED.after(as_it_is, replace(repaired, changed=False)) is None
    assert UNCALIBRATED.after(replace(as_it_is, unrivalled=True), repaired) is None
    assert UNCALIBRATED.after(PLANNED, repaired) is None


def test_a_plan_that_is_too_large_is_followed_by_one_for_fewer_bytes() -> None:
    second = UNCALIBRATED.after(PLANNED, needing(1200))
    assert second is not None
    assert (second.bytes_ratio, second.strict) == (1.2, False)
    third = second.after(PLANNED, needing(1010))
    assert third is not None
    assert third.bytes_ratio > second.bytes_ratio


def test_what_the_program_as_it_is_needs_is_known_and_no_plan_that_failed() -> None:
    as_it_is = replace(PLANNED, changed=False, recipe=Recipe(), planned_temp_bytes=1500)
    second = UNCALIBRATED.after(as_it_is, needing(1200))
    assert second is not None
    assert (second.bytes_ratio, second.strict) == (0.8, False)
    third = second.after(PLANNED, needing(1010))
    assert third is not None
    assert third.bytes_ratio == 1.01
    known = third.tried(Recipe(), 1500)
    assert known is not None
    assert known.temp_bytes == 1200
    assert third.tried(PLANNED.recipe, PLANNED.planned_temp_bytes) is None


def test_a_plan_of_which_xla_makes_far_less_is_followed_by_one_for_more_bytes() -> None:
    """ResNet-50 on a v5e: 8.4 GiB were planned, XLA made 6.2 of it; the plain program fits as it is."""
    cheap_ns = int(CONFIG.cheap_repair_ratio * PLANNED.cost_ns)
    dear = replace(PLANNED, recompute_ns=cheap_ns + 1)
    second = UNCALIBRATED.after(dear, needing(750))
    assert second is not None
    assert (second.bytes_ratio, second.strict) == (0.75, False)
    assert UNCALIBRATED.after(replace(PLANNED, recompute_ns=cheap_ns), needing(750)) is None
    assert UNCALIBRATED.after(dear, needing(int(1000 * CONFIG.too_deep_ratio) + 1)) is None
    assert UNCALIBRATED.after(replace(dear, planned_temp_bytes=800), needing(750)) is None


def test_xla_is_left_less_freedom_once_where_it_makes_something_else_of_a_plan() -> None:
    strict = UNCALIBRATED.after(PLANNED, needing(2000))
    assert strict is not None
    assert (strict.bytes_ratio, strict.strict) == (1.0, True)
    unchanged = UNCALIBRATED.after(replace(PLANNED, changed=False, recipe=Recipe()), needing(2000))
    assert unchanged is not None
    assert (unchanged.bytes_ratio, unchanged.strict) == (2.0, False)
    again = strict.after(PLANNED, needing(2000))
    assert again is not None
    assert (again.bytes_ratio, again.strict) == (2.0, True)


def test_of_rewritten_scans_it_is_remembered_what_each_needs() -> None:
    scan = replace(PLANNED, recipe=SCANS, planned_temp_bytes=800)
    known = UNCALIBRATED.after(scan, needing(1400))
    assert known is not None
    assert known.trials == (Trial(recipe=SCANS, estimated_bytes=800, temp_bytes=1400),)
    repaired = UNCALIBRATED.after(scan, needing(1400, found=True))
    assert repaired is not None
    assert repaired.trials[0].temp_bytes == 1000
    assert known.of_parts(8).tried(SCANS, 8 * 800 + 5) is not None
    assert known.tried(SCANS, 900) is None
    assert known.tried(ALONE, 800) is None


def test_rewritten_scans_that_are_repaired_fit_only_if_that_is_cheap() -> None:
    """Flax's scanned model on an H200: 97 MiB over, and 36 % slower once it was repaired."""
    scans = replace(PLANNED, recipe=ALONE)
    cheap_ns = int(CONFIG.cheap_repair_ratio * PLANNED.cost_ns)
    for repair_ns, temp_bytes in ((cheap_ns, 1000), (cheap_ns + 1, 1100)):
        found = UNCALIBRATED.after(scans, needing(1100, found=True, repair_ns=repair_ns))
        assert found is not None
        assert found.trials[0].temp_bytes == temp_bytes


def test_an_estimate_is_corrected_by_the_nearest_of_its_kind() -> None:
    trials = (
        Trial(recipe=ALONE, estimated_bytes=100, temp_bytes=110),
        Trial(recipe=ALONE, estimated_bytes=1000, temp_bytes=900),
    )
    known = Calibration(trials=trials)
    assert known.expected_ratio(ALONE, 120) == 1.1
    assert known.expected_ratio(ALONE, 800) == 0.9
    assert known.expected_ratio(SEGMENTS, 800, 1.5) == 1.5


def test_the_program_as_it_is_is_expected_as_the_largest_of_its_rewritten_scans() -> None:
    """A step of diffrax in the bytes that it needs as it is was estimated at 1.4 of these, and rewritten for
    so many: five times as slow, though XLA had made .6 of the plan."""
    scans = tuple(Trial(recipe=ALONE, estimated_bytes=n, temp_bytes=n // 2) for n in (800, 100))
    assert UNCALIBRATED.ratio_as_it_is == 1.0
    assert Calibration(trials=scans).ratio_as_it_is == 0.5
    as_it_is = Trial(recipe=Recipe(), estimated_bytes=1000, temp_bytes=900)
    assert Calibration(trials=(*scans, as_it_is)).ratio_as_it_is == 0.9
