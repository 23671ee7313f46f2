"""Time and energy of the kernels that a program's stored values are made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.cost import DeviceModel, kernel_ns, kernel_pj, scalar_work_ns, writing_ns
from passes.jaxpr import compat
from passes.jaxpr.avals import size_of
from passes.jaxpr.compat import Var
from passes.jaxpr.flops import largest_size, matrix_work, said_bytes, sent_bytes, vector_work
from passes.jaxpr.in_place import UPDATES
from passes.jaxpr.primitives import CONTROL_FLOW, INSIDE, RESHAPES, Kind
from passes.jaxpr.purity import moves_memory
from passes.jaxpr.rolled_bits import moved_bytes
from passes.jaxpr.scalar_work import scalar_work
from passes.jaxpr.split_dots import split_bytes, sum_ns
from passes.jaxpr.storage import WHOLE, Storage
from passes.jaxpr.together import Group, Together


class KernelCosts:
    """What the kernels of one jaxpr cost; asked for in their order."""

    def __init__(
        self, storage: Storage, device: DeviceModel, in_parts: Mapping[Var, int], together: Together | None
    ) -> None:
        """
        Args:
            storage: what is stored of the jaxpr.
            in_parts: of products that are stored in parts, how many kernels sum them.
            together: which kernels XLA makes one of; None where each is one of its own.
        """
        self._storage = storage
        self._device = device
        self._in_parts = in_parts
        self._together = together
        self.joins = together is not None
        self.kernel_of: dict[int, Group] = {}
        self._vector_flops = list(map(vector_work, storage.jaxpr.eqns, storage.kinds))
        works = map(scalar_work, storage.jaxpr.eqns) if device.scalar_ns else ()
        self._scalar_ns = [scalar_work_ns(device, work) for work in works]

    def of_kernel(self, root: int, body: Sequence[int], outvars: Sequence[Var]) -> tuple[int, int]:
        """Time and energy of one kernel, the time of what it sends to other devices, too.

        A copy to or from the host costs nothing, since it runs beside the kernels; nor does control flow,
        whose bodies are programs.

        Args:
            root: the place of its last equation.
            body: the places of all.
            outvars: what it makes.
        """
        device, kinds = self._device, self._storage.kinds
        eqn = self._storage.jaxpr.eqns[root]
        reads, own, group, joined = self._storage.kernel_reads(root), body, None, False
        if self._together is not None:
            of_product = any(kinds[i] in WHOLE for i in body)
            reads, own, group, joined = self._together.unread(root, body, reads, of_product=of_product)
        if group is not None:
            self.kernel_of[root] = group
        if moves_memory(eqn) or eqn.primitive.name in CONTROL_FLOW or self._is_seen_otherwise(root):
            return 0, 0
        is_saved = compat.checkpoint_name_of(eqn) is not None and kinds[root] is Kind.OPAQUE
        part = eqn.invars[UPDATES[eqn.primitive.name]] if self._storage.is_update(eqn) else None
        nbytes = said_bytes(eqn)
        if nbytes is None:
            written_bytes = sum(compat.aval_nbytes(v.aval) for v in outvars)
            if part is not None:
                written_bytes = min(written_bytes, compat.aval_nbytes(part.aval))
            nbytes = sum(reads.values()) + (split_bytes(eqn, device) or written_bytes)
            nbytes += moved_bytes(eqn, device)
        nbytes = 0 if is_saved else nbytes
        work = matrix_work([self._storage.jaxpr.eqns[i] for i in body if kinds[i] in WHOLE])
        own_ns = -device.launch_ns + kernel_ns(
            device, nbytes=nbytes, matrix_flops=work.flops, unaligned_flops=work.unaligned_flops,
            bits=work.bits, vector_flops=sum(self._vector_flops[i] for i in own),
            scalar_ns=sum(self._scalar_ns[i] for i in own) if self._scalar_ns else 0.0,
        )  # fmt: skip
        elementwise = not is_saved and all(kinds[i] in INSIDE for i in body if part is None or i != root)
        elements = largest_size(outvars) if part is None else size_of(part)
        least_ns = writing_ns(device, elements) if elementwise else 0
        ns = max(own_ns, least_ns) if group is None else group.longer_by_ns(own_ns, least_ns)
        ns += 0 if joined else device.launch_ns
        ns += sum_ns(eqn, device, sum(self._in_parts.get(v, 0) for v in outvars))
        ns += round(1e9 * sent_bytes(eqn) / device.link_bytes_per_second)
        return ns, kernel_pj(device, nbytes=nbytes, matrix_flops=work.flops, bits=work.bits)

    def _is_seen_otherwise(self, root: int) -> bool:
        """True for what lies in memory as something that is stored does, such as a slice of a stack that a
        barrier holds."""
        storage = self._storage
        named = storage.jaxpr.eqns[root].primitive.name in RESHAPES
        return named and storage.stored.issuperset(storage.operands[root])
