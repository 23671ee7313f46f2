"""An independent check of a plan: plain, quadratic, and knowing only the program and the plan.

It shares no helper with `passes.simulate` so that one can catch the other's mistakes.
"""

from __future__ import annotations

from passes.ir import OpId, Plan, Program


def validate(program: Program, plan: Plan) -> None:
    """Check that `plan` may be run and needs what it says.

    Raises:
        ValueError: a sentence that says what is wrong.
    """
    _check_order(program, plan)
    _check_inputs(program, plan)
    peak_bytes = _naive_peak_bytes(program, plan.steps)
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


def _dies_at(program: Program, steps: tuple[OpId, ...], run: int, buffer: int) -> int:
    """The step after which the copy of `buffer` that step `run` made is not needed; none for the end."""
    last = run
    for later in range(run + 1, len(steps)):
        op = program.ops[steps[later]]
        if buffer in op.inputs:
            last = later
        if buffer in op.outputs:
            return last
    return len(steps) if buffer in program.outputs else last


def _naive_peak_bytes(program: Program, steps: tuple[OpId, ...]) -> int:
    """Walk the steps with a plain table of what is held: {buffer: the step after which it goes}."""
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
            held[buffer] = _dies_at(program, steps, now, buffer)
        live_bytes = sum(program.buffers[buffer].nbytes for buffer in held)
        peak_bytes = max(peak_bytes, live_bytes + op.workspace_bytes - saved_bytes)
        held = {buffer: last for buffer, last in held.items() if last > now}
    return peak_bytes


def _check_overhead(program: Program, plan: Plan) -> None:
    once_ns = sum(op.cost_ns for op in program.ops)
    again_ns = sum(program.ops[plan.steps[i]].cost_ns for i in plan.reruns())
    ratio = again_ns / once_ns if once_ns else 0.0
    if abs(ratio - plan.overhead_ratio) > 1e-9 * max(1.0, ratio):
        raise ValueError(f"the plan says its overhead is {plan.overhead_ratio}, but its re-runs cost {ratio}")
    if plan.lower_bound_ratio > ratio + 1e-6 and plan.status.found:
        raise ValueError(f"the plan's lower bound {plan.lower_bound_ratio} is above its overhead {ratio}")


def _check_offsets(program: Program, plan: Plan) -> None:
    """No two copies that are alive at once overlap, but for an output in the place of a dying input."""
    copies: list[tuple[int, int, int, int, int]] = []
    for now, (step, offsets) in enumerate(zip(plan.steps, plan.offsets, strict=True)):
        op = program.ops[step]
        outputs = tuple(dict.fromkeys(op.outputs))
        for buffer, offset in zip(outputs, offsets, strict=True):
            nbytes = program.buffers[buffer].nbytes
            last = _dies_at(program, plan.steps, now, buffer)
            for other, begin, end, low, high in copies:
                apart = end < now or offset + nbytes <= low or high <= offset
                in_place = end == now and (buffer, other) in op.may_share
                if not apart and not (in_place and end < len(plan.steps)):
                    raise ValueError(
                        f"step {now} puts buffer {buffer} at bytes {offset} to {offset + nbytes}, where "
                        f"buffer {other} of step {begin} lies at {low} to {high} until step {end}"
                    )
            if nbytes:
                copies.append((buffer, now, last, offset, offset + nbytes))
