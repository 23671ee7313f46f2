"""The order in which kernels will run: XLA:CPU's own, and that of the enforcing stage, where it changes that.

XLA:CPU runs whatever is ready, first come, first served.

    a = f(x)          XLA:CPU runs both branches side by side, step by step, where the program says
    b = g(a)          one after the other: a, c, b, d. Whatever waits for nothing is run at the
    c = f(y)          start, such as the zeros that a loop will write the slices of a stack over:
    d = g(c)          the stacks of all loops take memory from the first step on.

Source: `BFScheduler` of openxla/xla, which XLA:CPU takes unless it is told to save memory. A bidirectional
LSTM's step, 28.7 MiB in the program's order, took 42.2: 40.9 are foreseen so.

What does not keep its budget so the enforcing stage puts in the program's order, and then moves what frees
memory and what takes it (`passes.reorder`): a ResNet-50, 48.6 MiB in the program's order, takes 27.5 so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from passes.cost import DeviceModel
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.in_place import rooms
from passes.jaxpr.lift import beside_results, branch_bytes, carried_by, lift_body
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.moved import waited
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.offsets.foreseen import in_results_bytes
from passes.simulate import simulate


def as_run(lifted: LiftedJaxpr, device: DeviceModel) -> Program:
    """The program in XLA:CPU's order, the stacks of its loops made at the start; linear in its size."""
    order = [_with_bodies_as_run(lifted, lifted.program.ops[k], device) for k in _breadth_first(lifted)]
    buffers = list(lifted.program.buffers)
    # Slices of stacks that have memory of their own.
    made = [_copy(b) for b in lifted.program.arguments if buffers[b].nbytes]
    for k, op in enumerate(order):
        started = {b: BufferId(len(buffers) + n) for n, b in enumerate(_stacks(lifted, op))}
        if not started:
            continue
        buffers += [Buffer(id=start, nbytes=buffers[b].nbytes) for b, start in started.items()]
        made += map(_copy, started.values())
        order[k] = replace(
            op,
            inputs=(*op.inputs, *started.values()),
            may_share=(*op.may_share, *started.items()),
        )
    return Program.build(
        name=lifted.program.name,
        ops=tuple(replace(op, id=OpId(k)) for k, op in enumerate((*made, *order))),
        buffers=tuple(buffers),
        outputs=lifted.program.outputs,
    )


def _copy(buffer: BufferId) -> Op:
    """What makes a buffer at the start, to be numbered."""
    return Op(id=OpId(0), inputs=(), outputs=(buffer,), cost_ns=0, recomputable=False)


def run_bytes(lifted: LiftedJaxpr, device: DeviceModel, fresh: frozenset[int] = frozenset()) -> int:
    """What XLA:CPU needs for temporaries in its own order; `fresh` as in `JaxprRequest`."""
    run = as_run(lifted, device)
    timeline = simulate(run)
    return timeline.peak_bytes - in_results_bytes(run, timeline, rooms(lifted, fresh, run))


def _with_bodies_as_run(lifted: LiftedJaxpr, op: Op, device: DeviceModel) -> Op:
    """Control flow takes what its largest body does in that order."""
    if op.name not in CONTROL_FLOW:
        return op
    eqn = lifted.jaxpr.eqns[lifted.bodies[op.id][-1]]
    if op.name == "cond":
        branches = [_branch_bytes(branch, device) for branch in compat.inner_jaxprs(eqn)]
        return replace(op, workspace_bytes=beside_results(eqn, branches, device))
    bodies = [_body_bytes(body, device, carried_by(eqn)) for body in compat.inner_jaxprs(eqn)]
    return replace(op, workspace_bytes=max(bodies, default=0))


@compat.cached_by_jaxpr
def _body_bytes(jaxpr: Jaxpr, device: DeviceModel, carried: tuple[int, int] | None) -> int:
    lifted, kept_bytes = lift_body(jaxpr, device, carried)
    return kept_bytes + run_bytes(lifted, device)


@compat.cached_by_jaxpr
def _branch_bytes(jaxpr: Jaxpr, device: DeviceModel) -> int:
    lifted, _ = lift_body(jaxpr, device, None)
    run = as_run(lifted, device)
    return branch_bytes(lifted, run, simulate(run), device)


def _breadth_first(lifted: LiftedJaxpr) -> list[OpId]:
    """The ops, each once all that it waits for has run, first come, first served."""
    before, n_ops = waited(lifted), len(lifted.program.ops)
    waits = {node: len(others) for node, others in before.items()}
    readers: dict[int, list[int]] = {node: [] for node in before}
    for node, others in before.items():
        for other in others:
            readers[other].append(node)
    ready = deque(node for node, n in waits.items() if not n)
    order = []
    while ready:
        node = ready.popleft()
        order += [OpId(node)] if node < n_ops else []
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return order


def _stacks(lifted: LiftedJaxpr, op: Op) -> list[BufferId]:
    """What a loop writes slice by slice; an interpreted Pallas kernel is a loop over its grid."""
    if op.name not in ("scan", "pallas_call"):
        return []
    eqn = lifted.jaxpr.eqns[lifted.bodies[op.id][-1]]
    n_carry = compat.scan_sizes(eqn)[1] if op.name == "scan" else 0
    stacks = [lifted.buffer_of[v] for v in eqn.outvars[n_carry:] if v in lifted.buffer_of]
    return [b for b in stacks if lifted.program.buffers[b].nbytes]
