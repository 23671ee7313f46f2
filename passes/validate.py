"""An independent check of a plan: plain, quadratic, and knowing only the program and the plan.

It shares no helper with `passes.simulate` so that one can catch the other's mistakes.
"""

from __future__ import annotations

from passes.ir import Page, Plan, Program
from passes.link import Link


def validate(program: Program, plan: Plan, link: Link | None = None) -> None:
    """Check that `plan` may be run and needs what it says.

    Args:
        link: what carries the plan's pages; without it the waiting that the plan tells of is believed.

    Raises:
        ValueError: a sentence that says what is wrong.
    """
    _check_order(program, plan)
    _check_inputs(program, plan)
    _check_pages(program, plan)
    if link is not None:
        _check_waiting(program, plan, link)
    peak_bytes = _naive_peak_bytes(program, plan)
    if peak_bytes != plan.peak_bytes:
        raise ValueError(
            f"the plan says its peak is {plan.peak_bytes} bytes, but it needs {peak_bytes} bytes"
        )
    if plan.status.found and peak_bytes > plan.budget_bytes:
        raise ValueError(
            f"the plan is {plan.status.value} for {plan.budget_bytes} bytes, it says, but needs {peak_bytes}"
        )
    _check_overhead(program, plan)
    if plan.offsets:
        _check_offsets(program, plan)


def _check_order(program: Program, plan: Plan) -> None:
    slot = 0
    for position, step in enumerate(plan.steps):
        if not 0 <= step < len(program.ops):
            raise ValueError(f"step {position} runs op {step}, but the program has {len(program.ops)} ops")
        if step == slot:
            slot += 1
        elif step > slot:
            raise ValueError(f"step {position} runs op {step} for the first time before op {slot}")
        elif not program.ops[step].recomputable:
            raise ValueError(f"step {position} runs op {step} again, but it is not recomputable")
        else:
            deadline = program.ops[step].deadline
            if deadline is not None and slot > deadline:
                raise ValueError(
                    f"step {position} runs op {step} again in slot {slot}, after its deadline {deadline}"
                )
    if slot != len(program.ops):
        raise ValueError(f"the plan never runs op {slot}; every op has to run")


def _check_inputs(program: Program, plan: Plan) -> None:
    made = set(program.arguments)
    for position, step in enumerate(plan.steps):
        for buffer in program.ops[step].inputs:
            if buffer not in made:
                raise ValueError(f"step {position} (op {step}) reads buffer {buffer} before it is made")
        made.update(program.ops[step].outputs)


def _uses(program: Program, plan: Plan, run: int, buffer: int) -> list[int]:
    """Steps that read what step `run` made of `buffer`; the number of steps for a last output."""
    uses = []
    for later in range(run + 1, len(plan.steps)):
        op = program.ops[plan.steps[later]]
        if buffer in op.inputs:
            uses.append(later)
        if buffer in op.outputs:
            return uses
    return [*uses, len(plan.steps)] if buffer in program.outputs else uses


def _check_pages(program: Program, plan: Plan) -> None:
    """Every page is of what is made, away only while nothing reads it, and back when it is needed."""
    n_steps = len(plan.steps)
    for page in plan.pages:
        run = page.run
        if run is None or not 0 <= run < n_steps:
            raise ValueError(f"a page is of step {run}, but steps are 0 to {n_steps - 1}: {page}")
        if page.buffer not in program.ops[plan.steps[run]].outputs:
            raise ValueError(f"step {run} does not make buffer {page.buffer}: {page}")
        if not run < page.out_done <= page.in_start <= page.in_done or page.in_start >= n_steps:
            raise ValueError(f"the moments of a page are out of order: {page}")
        if not program.buffers[page.buffer].pageable:
            raise ValueError(f"buffer {page.buffer} cannot be sent to the host: {page}")
        uses = _uses(program, plan, run, page.buffer)
        for use in uses:
            if page.out_done <= use < page.in_done:
                raise ValueError(f"step {use} reads buffer {page.buffer} while it is away: {page}")
        if not uses or uses[-1] < page.in_done:
            raise ValueError(f"nothing needs buffer {page.buffer} when it is back: {page}")
        for other in plan.pages:
            same = other is not page and (other.buffer, other.run) == (page.buffer, run)
            if same and page.out_done < other.in_done and other.out_done < page.in_done:
                raise ValueError(f"two pages of one live range overlap: {page} and {other}")
    peak_bytes = max((_host_bytes(program, plan, step) for step in range(n_steps + 1)), default=0)
    if peak_bytes != plan.host_peak_bytes:
        raise ValueError(
            f"the plan says its pages take {plan.host_peak_bytes} bytes on the host, "
            f"but they take {peak_bytes}"
        )
    if plan.status.found and peak_bytes > plan.host_budget_bytes:
        raise ValueError(
            f"the plan takes {peak_bytes} bytes on the host, where {plan.host_budget_bytes} are allowed"
        )


def _host_bytes(program: Program, plan: Plan, step: int) -> int:
    """Bytes on the host just before step `step`: live ranges that have been made and will come back."""
    there = {
        (page.run, page.buffer)
        for page in plan.pages
        if page.run is not None and page.run < step <= page.in_done
    }
    return sum(program.buffers[buffer].nbytes for _, buffer in there)


def _is_first(plan: Plan, page: Page) -> bool:
    """True if no page of the same live range leaves before this one."""
    return all(
        page.out_done <= other.out_done
        for other in plan.pages
        if (other.buffer, other.run) == (page.buffer, page.run)
    )


def _check_waiting(program: Program, plan: Plan, link: Link) -> None:
    """Go through the steps with a clock and two lists of (page, when its copy ends)."""
    clock = waiting_ns = 0
    out: list[tuple[Page, int]] = []
    back: list[tuple[Page, int]] = []
    for now in range(len(plan.steps) + 1):
        ends = [clock]
        ends += [end for page, end in out if page.out_done == now]
        clock, waiting_ns = max(ends), waiting_ns + max(ends) - clock
        for page in plan.pages:
            if page.in_start == now:
                begin = max([clock, *(end for _, end in back)])
                back.append((page, begin + link.from_host_ns(program.buffers[page.buffer].nbytes)))
        ends = [clock, *(end for page, end in back if page.in_done == now)]
        clock, waiting_ns = max(ends), waiting_ns + max(ends) - clock
        if now < len(plan.steps):
            clock += program.ops[plan.steps[now]].cost_ns
        for page in sorted(plan.pages, key=lambda page: page.buffer):
            if page.run == now and _is_first(plan, page):
                begin = max([clock, *(end for _, end in out)])
                out.append((page, begin + link.to_host_ns(program.buffers[page.buffer].nbytes)))
    if waiting_ns != plan.waiting_ns:
        raise ValueError(
            f"the plan says it waits {plan.waiting_ns} ns for the link, but on {link.name or 'this one'} "
            f"it waits {waiting_ns} ns"
        )


def _dies_at(program: Program, plan: Plan, run: int, buffer: int) -> int:
    """The step after which what step `run` made of `buffer` is not needed; none for the end."""
    return max([run, *_uses(program, plan, run, buffer)])


def _lives(program: Program, plan: Plan, run: int, buffer: int) -> list[tuple[int, int]]:
    """From which step to which, both included, it is on the device; the first part was made there."""
    parts = []
    begin = run
    for page in sorted(plan.pages, key=lambda page: page.out_done):
        if (page.run, page.buffer) == (run, buffer):
            parts.append((begin, page.out_done - 1))
            begin = page.in_start
    return [*parts, (begin, _dies_at(program, plan, run, buffer))]


def _is_away(plan: Plan, buffer: int, step: int) -> bool:
    return any(page.buffer == buffer and page.out_done <= step < page.in_start for page in plan.pages)


def _naive_peak_bytes(program: Program, plan: Plan) -> int:
    """Walk the steps with a plain table of what is held: {buffer: the step after which it goes}.

    What is on the host stays in the table, and is not counted.
    """
    steps = plan.steps
    held = {buffer: len(steps) for buffer in program.arguments}
    peak_bytes = sum(program.buffers[buffer].nbytes for buffer in held)
    for now, step in enumerate(steps):
        op = program.ops[step]
        dying = [b for b, last in held.items() if last == now and b in op.inputs]
        saved_bytes = 0
        placed: list[int] = []
        for output, source in op.may_share:
            if source in dying and output not in placed:
                saved_bytes += min(program.buffers[output].nbytes, program.buffers[source].nbytes)
                dying.remove(source)
                placed.append(output)
        for buffer in op.outputs:
            held[buffer] = _dies_at(program, plan, now, buffer)
        live_bytes = sum(program.buffers[b].nbytes for b in held if not _is_away(plan, b, now))
        peak_bytes = max(peak_bytes, live_bytes + op.workspace_bytes - saved_bytes)
        held = {buffer: last for buffer, last in held.items() if last > now}
    return peak_bytes


def _check_overhead(program: Program, plan: Plan) -> None:
    once_ns = sum(op.cost_ns for op in program.ops)
    recompute_ns = sum(program.ops[plan.steps[i]].cost_ns for i in plan.recomputes()) + plan.waiting_ns
    ratio = recompute_ns / once_ns if once_ns else 0.0
    if abs(ratio - plan.overhead_ratio) > 1e-9 * max(1.0, ratio):
        what = "its recomputes and waiting cost" if plan.waiting_ns else "its recomputes cost"
        raise ValueError(f"the plan says its overhead is {plan.overhead_ratio}, but {what} {ratio}")
    if plan.lower_bound_ratio > ratio + 1e-6 and plan.status.found:
        raise ValueError(f"the plan's lower bound {plan.lower_bound_ratio} is above its overhead {ratio}")


def _check_offsets(program: Program, plan: Plan) -> None:
    """No two live ranges that are alive at once overlap, but for an output in the place of a dying input."""
    copies: list[tuple[int, int, int, int, int]] = []
    for now, buffer, last, offset, is_made in _placed(program, plan):
        nbytes = program.buffers[buffer].nbytes
        for other, begin, end, low, high in copies:
            apart = end < now or last < begin or offset + nbytes <= low or high <= offset
            in_place = is_made and end == now and (buffer, other) in program.ops[plan.steps[now]].may_share
            leaves = any(p.buffer == other and p.out_done == end + 1 for p in plan.pages)
            if not apart and not (in_place and end < len(plan.steps) and not leaves):
                raise ValueError(
                    f"step {now} puts buffer {buffer} at bytes {offset} to {offset + nbytes}, where "
                    f"buffer {other} of step {begin} lies at {low} to {high} until step {end}"
                )
        if nbytes:
            copies.append((buffer, now, last, offset, offset + nbytes))


def _placed(program: Program, plan: Plan) -> list[tuple[int, int, int, int, bool]]:
    """(first step, buffer, last step, offset, whether that step makes it) of all that has an offset."""
    placed = []
    back = {
        (page.buffer, page.run, page.in_start): offset
        for page, offset in zip(plan.pages, plan.page_offsets, strict=True)
    }
    for now, (step, offsets) in enumerate(zip(plan.steps, plan.offsets, strict=True)):
        outputs = tuple(dict.fromkeys(program.ops[step].outputs))
        for buffer, offset in zip(outputs, offsets, strict=True):
            made, *returned = _lives(program, plan, now, buffer)
            placed.append((made[0], buffer, made[1], offset, True))
            placed += [(begin, buffer, last, back[buffer, now, begin], False) for begin, last in returned]
    return sorted(placed, key=lambda copy: (copy[0], not copy[4]))
