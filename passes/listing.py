"""Programs and plans as text that a person reads; `tests/reading.py` reads it back.

    program "example", 6 ops, 6 buffers, cost 33
    # live bytes                  op
      0 |######              4 |  %0[4] = embed()  cost 10
      1 |############        8 |  %1[4] = layer(%0)  cost 5
    outputs %5

Bytes are in brackets behind the buffer that an op makes. What stands between "|" is the profile: it is there
for the eyes, and says nothing that the rest does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from passes.checked import InputError, json_of, listed, mapped, whole, worded
from passes.ir import PLAN_FORMAT, BufferId, Op, OpId, Page, Plan, Program, Status, as_text
from passes.simulate import simulate

_BAR = 16
_STEPS_A_ROW = 20
_PLAIN = re.compile(r"[\w.\-]+")


@as_text.register
def program_text(program: Program) -> str:
    """A program as text, op by op, with the bytes alive at each."""
    live = simulate(program).live_bytes.tolist()
    lines = [
        f"program {json.dumps(program.name)}, {len(program.ops)} ops, {len(program.buffers)} buffers, "
        f"cost {program.cost_ns}"
    ]
    arguments = " ".join(_sized(program, b) for b in program.arguments)
    lines += [f"arguments {arguments}"] if arguments else []
    stay = " ".join(f"%{b.id}" for b in program.buffers if not b.pageable)
    lines += [f"stay {stay}"] if stay else []
    width = len(str(max(live, default=0)))
    lines += [
        f"{op.id:4} |{_bar(n, live)}{n:{width + 1}} |  {_op_text(program, op)}"
        for op, n in zip(program.ops, live, strict=True)
    ]
    return "\n".join([*lines, f"outputs {' '.join(f'%{b}' for b in program.outputs)}".rstrip(), ""])


def _op_text(program: Program, op: Op) -> str:
    outs = ", ".join(_sized(program, b) for b in op.outputs)
    name = op.name if _PLAIN.fullmatch(op.name) or not op.name else json.dumps(op.name)
    facts = "" if op.recomputable else "  once"
    facts += "" if op.deadline is None else f"  deadline {op.deadline}"
    facts += f"  workspace {op.workspace_bytes}" if op.workspace_bytes else ""
    facts += f"  energy {op.energy_pj}" if op.energy_pj else ""
    facts += "".join(f"  shares %{out}/%{inp}" for out, inp in op.may_share)
    source = f"  # {' '.join(op.source.split())}" if op.source else ""
    return f"{outs} = {name}({', '.join(f'%{b}' for b in op.inputs)})  cost {op.cost_ns}{facts}{source}"


def _sized(program: Program, buffer: BufferId) -> str:
    return f"%{buffer}[{program.buffers[buffer].nbytes}]"


def _bar(nbytes: int, live: Sequence[int]) -> str:
    return ("#" * round(_BAR * nbytes / max(1, max(live)))).ljust(_BAR)


@as_text.register
def plan_text(plan: Plan, program: Program | None = None) -> str:
    """A plan as text; with its program also what each step runs, and the bytes alive at it.

    Raises:
        InputError: the plan is not one of the program's.
    """
    recomputed = frozenset(plan.recomputes())
    head = [
        f"plan by {json.dumps(plan.planner or 'hand')}: {plan.status}, "
        f"peak {plan.peak_bytes} of {plan.budget_bytes} bytes, {len(plan.steps)} steps, "
        f"{len(recomputed)} recomputed",
        f"overhead {plan.overhead_ratio!r}, at least {plan.lower_bound_ratio!r}, planned in "
        f"{plan.seconds!r} s",
    ]
    if plan.host_budget_bytes or plan.pages:
        head.append(
            f"{len(plan.pages)} paged, peak on the host {plan.host_peak_bytes} of {plan.host_budget_bytes} "
            f"bytes, waiting {plan.waiting_ns} ns"
        )
    rows = _step_rows(plan, recomputed) if program is None else _op_rows(plan, program, recomputed)
    return "\n".join([*head, *rows, *_offset_rows(plan), *_page_rows(plan), ""])


def _step_rows(plan: Plan, recomputed: frozenset[int]) -> list[str]:
    steps = [f"{step}*" if i in recomputed else str(step) for i, step in enumerate(plan.steps)]
    rows = [" ".join(steps[i : i + _STEPS_A_ROW]) for i in range(0, len(steps), _STEPS_A_ROW)]
    return ["steps, recomputed ones with a star", *rows]


def _op_rows(plan: Plan, program: Program, recomputed: frozenset[int]) -> list[str]:
    try:
        live = simulate(program, plan.steps, plan.pages).live_bytes.tolist()
    except (ValueError, IndexError) as error:
        raise InputError(f"the plan is not one of this program's: {error}") from error
    width = len(str(max(live, default=0)))
    moves = _moves(program, plan.pages)
    return [
        f"{i:4} |{_bar(live[i], live)}{live[i]:{width + 1}} | {'*' if i in recomputed else ' '}{step:4}  "
        f"{_op_text(program, program.ops[step])}{moves.get(i, '')}"
        for i, step in enumerate(plan.steps)
    ]


def _offset_rows(plan: Plan) -> list[str]:
    return [f"at {i}: {' '.join(map(str, offsets))}".rstrip() for i, offsets in enumerate(plan.offsets)]


def _page_rows(plan: Plan) -> list[str]:
    rows = [
        f"page %{p.buffer} of step {p.run}: out before {p.out_done}, in from {p.in_start} to {p.in_done}"
        for p in plan.pages
    ]
    if not plan.page_offsets:
        return rows
    return [f"{row}, at {offset}" for row, offset in zip(rows, plan.page_offsets, strict=True)]


def _moves(program: Program, pages: Sequence[Page]) -> dict[int, str]:
    """For steps what leaves the device, or comes back, just before them."""
    moves: dict[int, str] = {}
    for page in pages:
        name = _sized(program, page.buffer)
        moves[page.out_done] = moves.get(page.out_done, "") + f"  out {name}"
        moves[page.in_start] = moves.get(page.in_start, "") + f"  in {name}"
    return moves


def read_plan(text: str) -> Plan:
    """A plan in the `coop-plan/1` format.

    Raises:
        InputError: it is something else, with what is wrong.
    """
    data = json_of(text)
    if not isinstance(data, Mapping) or data.get("format") != PLAN_FORMAT:
        raise InputError(f'expected "format": "{PLAN_FORMAT}"')
    given = mapped(data, "the plan", ("steps", "peak_bytes", "budget_bytes", "status"))
    steps = tuple(OpId(whole(s, f"steps[{i}]")) for i, s in enumerate(listed(given["steps"], "steps")))
    if given["status"] not in [status.value for status in Status]:
        raise InputError(f"status is {given['status']!r}, expected one of {', '.join(Status)}")
    return Plan(
        steps=steps,
        peak_bytes=whole(given["peak_bytes"], "peak_bytes"),
        budget_bytes=whole(given["budget_bytes"], "budget_bytes"),
        overhead_ratio=_ratio(given, "overhead_ratio"),
        lower_bound_ratio=_ratio(given, "lower_bound_ratio"),
        status=Status(given["status"]),
        planner=worded(given.get("planner", ""), "planner"),
        seconds=_ratio(given, "seconds"),
        energy_pj=whole(given.get("energy_pj", 0), "energy_pj"),
        **_host_of(given.get("host")),
    )


def _host_of(value: object) -> dict[str, Any]:
    """What a plan says of the host."""
    if value is None:
        return {}
    host = mapped(value, "host", ("budget_bytes", "peak_bytes", "waiting_ns", "pages"))
    offsets = listed(host.get("page_offsets", []), "page_offsets")
    return {
        "host_budget_bytes": whole(host["budget_bytes"], "budget_bytes of host"),
        "host_peak_bytes": whole(host["peak_bytes"], "peak_bytes of host"),
        "waiting_ns": whole(host["waiting_ns"], "waiting_ns"),
        "pages": tuple(_page(p, f"pages[{i}]") for i, p in enumerate(listed(host["pages"], "pages"))),
        "page_offsets": tuple(whole(n, f"page_offsets[{i}]") for i, n in enumerate(offsets)),
    }


def _page(value: object, what: str) -> Page:
    numbers = [whole(n, what) for n in listed(value, what)]
    if len(numbers) != 5:
        raise InputError(f"{what} has {len(numbers)} numbers; a page is a buffer, its run and three moments")
    buffer, run, out_done, in_start, in_done = numbers
    return Page(buffer=BufferId(buffer), run=run, out_done=out_done, in_start=in_start, in_done=in_done)


def _ratio(given: Mapping[str, object], key: str) -> float:
    value = given.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} is {value!r}, expected a number")
    return float(value)
