"""Programs and plans read back from the text of `passes.listing`: it says all that there is to them."""

from __future__ import annotations

import json
import re

from passes.checked import InputError
from passes.ir import Buffer, BufferId, Op, OpId, Page, Plan, Program, Status

_LINE = re.compile(
    r"\s*\d+ \|[^|]*\|  (?P<outs>[^=]*)= (?P<name>\"(?:[^\"\\]|\\.)*\"|[\w.\-]*)"
    r"\((?P<ins>[^)]*)\)  cost (?P<cost>\d+)"
    r"(?P<facts>(?:  [a-z]+(?: \S+)?)*)(?:  # (?P<source>.*))?"
)
_HEAD = re.compile(r"program (?P<name>\"(?:[^\"\\]|\\.)*\"), \d+ ops, (?P<buffers>\d+) buffers, cost \d+")
_BUFFER = re.compile(r"%(\d+)(?:\[(\d+)\])?")
_PLAN = re.compile(
    r"plan by (?P<planner>\"(?:[^\"\\]|\\.)*\"): (?P<status>[a-z]+), peak (?P<peak>\d+) of (?P<budget>-?\d+) "
    r"bytes, \d+ steps, \d+ recomputed\n"
    r"overhead (?P<overhead>\S+), at least (?P<bound>\S+), planned in (?P<seconds>\S+) s(?:\n|$)"
    r"(?:(?P<pages>\d+) paged, peak on the host (?P<host_peak>\d+) of (?P<host>\d+) bytes, "
    r"waiting (?P<waiting>\d+) ns)?"
)
_STEP = re.compile(r"\s*\d+ \|[^|]*\| [* ] *(?P<op>\d+)  ")
_STEPS = re.compile(r"(\d+\*?( |$))*")
_OFFSETS = re.compile(r"at \d+:(?P<offsets>( \d+)*)")
_PAGE = re.compile(
    r"page %(?P<buffer>\d+) of step (?P<run>\d+|None): out before (?P<out>\d+), "
    r"in from (?P<begin>\d+) to (?P<end>\d+)(?:, at (?P<at>\d+))?"
)


def read_program(text: str) -> Program:
    """The program that `program_text` wrote.

    Raises:
        InputError: a line is not one of its lines.
    """
    lines = text.rstrip("\n").split("\n")
    head = _HEAD.fullmatch(lines[0])
    if head is None or not lines[-1].startswith("outputs"):
        raise InputError("this is no program as text: it begins with `program` and ends with `outputs`")
    nbytes = [0] * int(head["buffers"])
    ops: list[Op] = []
    stay: set[int] = set()
    for line in lines[1:-1]:
        if line.startswith("stay "):
            stay.update(int(b) for b, _ in _BUFFER.findall(line))
            continue
        if line.startswith("arguments "):
            _note_sizes(line, nbytes)
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"this is no op: {line[:80]!r}")
        _note_sizes(match["outs"], nbytes)
        ops.append(_op_of(OpId(len(ops)), match))
    buffers = tuple(Buffer(id=BufferId(i), nbytes=n, pageable=i not in stay) for i, n in enumerate(nbytes))
    outputs = tuple(BufferId(int(b)) for b, _ in _BUFFER.findall(lines[-1]))
    return Program.build(name=json.loads(head["name"]), ops=tuple(ops), buffers=buffers, outputs=outputs)


def _note_sizes(text: str, nbytes: list[int]) -> None:
    for b, size in _BUFFER.findall(text):
        nbytes[int(b)] = int(size)


def _op_of(op_id: OpId, match: re.Match[str]) -> Op:
    facts = match["facts"].split()
    name = match["name"]

    def after(word: str) -> list[str]:
        return [facts[i + 1] for i, fact in enumerate(facts) if fact == word]

    shares = [_BUFFER.findall(pair) for pair in after("shares")]
    return Op(
        id=op_id,
        inputs=tuple(BufferId(int(b)) for b, _ in _BUFFER.findall(match["ins"])),
        outputs=tuple(BufferId(int(b)) for b, _ in _BUFFER.findall(match["outs"])),
        cost_ns=int(match["cost"]),
        recomputable="once" not in facts,
        deadline=next((int(n) for n in after("deadline")), None),
        may_share=tuple((BufferId(int(out)), BufferId(int(inp))) for (out, _), (inp, _) in shares),
        workspace_bytes=next((int(n) for n in after("workspace")), 0),
        name=json.loads(name) if name.startswith('"') else name,
        source=match["source"] or "",
        energy_pj=next((int(n) for n in after("energy")), 0),
    )


def read_plan_text(text: str) -> Plan:
    """The plan that `plan_text` wrote, with or without its program.

    Raises:
        InputError: a line is not one of its lines.
    """
    lines = text.rstrip("\n").split("\n")
    head = _PLAN.match("\n".join(lines[:3]))
    if head is None:
        raise InputError("this is no plan as text: it begins with `plan by` and `overhead`")
    steps: list[OpId] = []
    offsets: list[tuple[int, ...]] = []
    pages: list[tuple[Page, str | None]] = []
    for line in lines[3 if head["pages"] else 2 :]:
        if match := _PAGE.fullmatch(line):
            pages.append((_page_of(match), match["at"]))
        elif match := _OFFSETS.fullmatch(line):
            offsets.append(tuple(map(int, match["offsets"].split())))
        elif match := _STEP.match(line):
            steps.append(OpId(int(match["op"])))
        elif _STEPS.fullmatch(line):
            steps += [OpId(int(word.rstrip("*"))) for word in line.split()]
        elif not line.startswith("steps"):
            raise InputError(f"this is no step of a plan: {line[:80]!r}")
    planner = json.loads(head["planner"])
    return Plan(
        steps=tuple(steps),
        peak_bytes=int(head["peak"]),
        budget_bytes=int(head["budget"]),
        overhead_ratio=float(head["overhead"]),
        lower_bound_ratio=float(head["bound"]),
        status=Status(head["status"]),
        planner="" if planner == "hand" else planner,
        seconds=float(head["seconds"]),
        offsets=tuple(offsets),
        pages=tuple(page for page, _ in pages),
        page_offsets=tuple(int(at) for _, at in pages if at is not None),
        waiting_ns=int(head["waiting"] or 0),
        host_peak_bytes=int(head["host_peak"] or 0),
        host_budget_bytes=int(head["host"] or 0),
    )


def _page_of(match: re.Match[str]) -> Page:
    return Page(
        buffer=BufferId(int(match["buffer"])),
        run=None if match["run"] == "None" else int(match["run"]),
        out_done=int(match["out"]),
        in_start=int(match["begin"]),
        in_done=int(match["end"]),
    )
