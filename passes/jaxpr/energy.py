"""What the ops of a lifted jaxpr take in energy: of their bytes and products, as for scheduled kernels.

`coop.remat` plans for time. A program that it dumps says its energy, too, so that `coop solve --objective
energy` can plan it; what XLA fuses further is not known here, so that bytes are rather too many.
"""

from __future__ import annotations

from dataclasses import replace

from passes.cost import DeviceModel, kernel_pj
from passes.ir import OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr, JaxprEqn
from passes.jaxpr.flops import matrix_work, said_bytes
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.primitives import CONTROL_FLOW, SLICING
from passes.jaxpr.purity import moves_memory


def with_energy(lifted: LiftedJaxpr, device: DeviceModel) -> Program:
    """The lifted program with `energy_pj` of every op; as it is where the device's power is not known."""
    if not device.watts:
        return lifted.program
    ops = tuple(replace(op, energy_pj=_op_pj(lifted, op.id, device)) for op in lifted.program.ops)
    return replace(lifted.program, ops=ops)


def _op_pj(lifted: LiftedJaxpr, op: OpId, device: DeviceModel) -> int:
    """Energy of one run of an op in picojoules."""
    eqns = [lifted.jaxpr.eqns[i] for i in lifted.bodies[op]]
    root = eqns[-1]
    if moves_memory(root):
        return 0
    if root.primitive.name in CONTROL_FLOW:
        return _inner_pj(root, device)
    nbytes = said_bytes(root)
    if nbytes is None:
        written = sum(compat.aval_nbytes(v.aval) for v in root.outvars)
        read = [compat.aval_nbytes(lifted.var_of[b].aval) for b in lifted.program.ops[op].inputs]
        nbytes = written + sum(min(n, written) if root.primitive.name in SLICING else n for n in read)
    flops, bits = matrix_work(eqns)
    return kernel_pj(device, nbytes=nbytes, matrix_flops=flops, bits=bits)


def _inner_pj(eqn: JaxprEqn, device: DeviceModel) -> int:
    """Energy of control flow: all iterations of a scan, one of another loop, the dearest branch."""
    inner = [_body_pj(body, device) for body in compat.inner_jaxprs(eqn)]
    total = max(inner, default=0) if eqn.primitive.name == "cond" else sum(inner)
    return total * int(eqn.params.get("length") or 1)


@compat.cached_by_jaxpr
def _body_pj(body: Jaxpr, device: DeviceModel) -> int:
    flat = body if body.constvars else compat.open_jaxpr(inline_calls(compat.close_jaxpr(body, [])))[0]
    program = with_energy(lift(flat, device, as_xla=True), device)
    return sum(op.energy_pj for op in program.ops)
