"""The exact packers against brute force, and `coop pack`."""

from __future__ import annotations

import random
import sys
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from ortools.sat.python import cp_model
from strategies import items_to_pack

from benchmarks.pack import cut_up
from coop_cli import main
from passes.offsets.packers import PACKERS
from passes.offsets.packers import pack as placed
from passes.offsets.packing import Item, Problem, Span, apart, check_packing, height_bytes, live_bytes
from passes.offsets.solver import LimitError, Sweep
from passes.offsets.tight import live_bound, pack_tight
from passes.offsets.xla_heap import Interval
from passes.offsets.xla_heap import pack as pack_as_xla
from passes.planners.exact.rectangles import model_of, pack


def least_height(items: list[Item]) -> int:
    """Brute force: some order of placing every item as low as what is placed leaves it is optimal."""
    best = sum(max(span.nbytes for span in item) for item in items)
    for order in permutations(range(len(items))):
        offsets = [-1] * len(items)
        height = 0
        for i in order:
            offset = 0
            for j in order:
                if offsets[j] < 0:
                    break
                for a in items[i]:
                    for b in items[j]:
                        if a.start < b.stop and b.start < a.stop:
                            offset = max(offset, offsets[j] + b.nbytes)
            offsets[i] = offset
            height = max(height, *(offset + span.nbytes for span in items[i]))
            if height >= best:
                break
        else:
            best = height
    return best


@settings(max_examples=40)
@given(items_to_pack())
def test_both_packers_agree_with_brute_force(items: list[Item]):
    least = least_height(items)
    for capacity, fits in ((least, True), (least - 1, False)):
        found = Sweep(items, capacity).solve(10**6)
        assert (found is not None) is fits
        if found is not None:
            check_packing(items, found, capacity)
        if max(span.nbytes for item in items for span in item) <= capacity:
            model, _, _ = model_of(items, capacity)
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = 1
            solved = solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
            assert solved is fits


@settings(max_examples=20)
@given(items_to_pack())
def test_pack_says_what_it_knows(items: list[Item]):
    least = least_height(items)
    made = pack(items, least)
    assert made.fits is True
    check_packing(items, made.offsets, least)
    assert live_bytes(items) <= height_bytes(items, made.offsets) == least
    assert pack(items, least - 1).fits is False


@pytest.mark.parametrize("seed", [0, 5])
def test_a_rectangle_cut_into_a_hundred_items_is_put_together(seed: int):
    items = cut_up(100, 1000, 512, seed)
    assert live_bytes(items) == 512
    made = pack(items, 512)
    assert made.fits is True
    check_packing(items, made.offsets, 512)


@pytest.mark.parametrize(("seed", "first"), [(5, "best fit"), (1, "ground up"), (0, "search")])
def test_each_packer_packs_what_those_before_it_do_not(seed: int, first: str):
    items = cut_up(60, 40, 100, seed)
    problem = Problem(items=items, capacity_bytes=108, ground_bytes=8)
    for name, packer in PACKERS.items():
        offsets = packer(problem)
        assert offsets is None or name == "best fit" or height_bytes(items, offsets) <= 100
        if offsets is not None and height_bytes(items, offsets) <= 100:
            break
    assert name == first
    assert offsets == placed(problem)
    check_packing(items, offsets, 100)


def test_where_no_packer_keeps_the_capacity_best_fit_is_taken():
    items = cut_up(60, 40, 100, 1)
    assert placed(Problem(items=items, capacity_bytes=99)) == PACKERS["best fit"](
        Problem(items=items, capacity_bytes=None)
    )


@pytest.mark.parametrize("seed", range(4))
def test_intervals_are_packed_tighter_than_xla_does(seed: int):
    generator = random.Random(seed)
    lives = [(start := generator.randrange(60), start + generator.randrange(1, 20)) for _ in range(60)]
    intervals = [
        Interval(key=k, nbytes=generator.randint(1, 4096), start=start, end=end, group=k, leads=True)
        for k, (start, end) in enumerate(lives)
    ]
    tight, bound_bytes = pack_tight(intervals, 64), live_bound(intervals, 64)
    items = [(Span(start=i.start, stop=i.end + 1, nbytes=i.nbytes),) for i in intervals]
    check_packing(items, [tight.offsets[i.group] for i in intervals], tight.size)
    assert not any(offset % 64 for offset in tight.offsets.values())
    assert bound_bytes <= tight.size <= 1.01 * bound_bytes
    assert tight.size < pack_as_xla(intervals, 64).size


def test_items_that_are_apart_are_packed_apart():
    items = [
        (Span(start=0, stop=2, nbytes=4), Span(start=4, stop=5, nbytes=1)),
        (Span(start=3, stop=4, nbytes=2),),
        (Span(start=5, stop=7, nbytes=3),),
        (Span(start=6, stop=7, nbytes=0),),
    ]
    assert apart(items) == [[3], [0, 1], [2]]
    tight = [(Span(start=0, stop=1, nbytes=6),), (Span(start=1, stop=2, nbytes=9),)]
    assert pack(tight, 9).fits is True
    assert pack(tight, 8).fits is False


def test_a_tall_stack_is_searched_without_recursion():
    height = sys.getrecursionlimit() // 2
    items = [(Span(start=min(i, 5), stop=10 + i, nbytes=1),) for i in range(height)]
    found = Sweep(items, height).solve(7500, first_round=2)
    assert found is not None
    assert sorted(found) == list(range(height))


def test_the_answer_is_the_same_each_time():
    items = cut_up(150, 1000, 512, 2)
    assert pack(items, 512).offsets == pack(items, 512).offsets


def test_the_limit_is_not_a_proof():
    items = [(Span(start=i, stop=i + 3, nbytes=2 + i % 3),) for i in range(12)]
    with pytest.raises(LimitError):
        Sweep(items, live_bytes(items)).solve(2)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [((0, 2), "overlap"), ((0, 7), "of 8"), ((-1, 4), "of 8"), ((0,), "2 items and 1 offsets")],
)
def test_the_checker_says_what_is_wrong(offsets: tuple[int, ...], message: str):
    items = [(Span(start=0, stop=2, nbytes=4),), (Span(start=1, stop=3, nbytes=4),)]
    check_packing(items, (0, 4), 8)
    with pytest.raises(ValueError, match=message):
        check_packing(items, offsets, 8)


@pytest.fixture
def problem_path(tmp_path: Path) -> Path:
    path = tmp_path / "problem.csv"
    path.write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\nc,2,4,4\n")
    return path


def test_pack_writes_offsets(problem_path: Path, capsys: pytest.CaptureFixture[str]):
    out = problem_path.with_name("out.csv")
    assert main(["pack", str(problem_path), "--capacity", "8 B", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "status       fits" in text
    assert "milliseconds" in text
    lines = out.read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert lines[1].rsplit(",", 1)[0] == "a,0,2,4"


def test_too_little_is_proved_and_exit_code_1(problem_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["pack", str(problem_path), "--capacity", "7"]) == 1
    assert "proved not to fit (live bytes)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [("id,lower,upper\n", "no column size"), ("id,lower,upper,size\na,0,x,1\n", "line 2"),
     ("id,lower,upper,size\na,3,1,1\n", "line 2")],
)  # fmt: skip
def test_broken_problems_are_exit_code_2(
    problem_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
):
    problem_path.write_text(text)
    assert main(["pack", str(problem_path), "--capacity", "7"]) == 2
    assert message in capsys.readouterr().err
