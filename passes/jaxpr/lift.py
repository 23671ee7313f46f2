"""Lift a jaxpr to a `Program`, knowing what XLA fuses.

A jaxpr names every intermediate value, XLA stores few of them: elementwise chains are computed inside
the kernels that read them. Here a value is **stored** (it becomes a buffer) if a kernel needs it in
memory, if it is a result, or if computing it inside each of its readers would move more bytes than
storing it once. Every other value is **virtual**: an op's body holds all equations that are computed
inside its kernel, and its inputs are the stored values that they read (their leaves).

Invariant: every equation with a use or an effect is in some op's body; the bodies of two ops may share
virtual equations; an op's last equation is the only one whose results are stored.

What it does not do: control flow is one opaque kernel whose inner peak counts as workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.backend import BACKENDS
from passes.cost import DeviceModel, kernel_ns, kernel_pj
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import iterations_of, matrix_work, said_bytes, sent_bytes, vector_work
from passes.jaxpr.in_place import (
    IN_PLACE,
    UPDATES,
    aliased,
    carries_shared,
    result_storage,
    updated_in_place,
    written_over,
)
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.primitives import CONTROL_FLOW, SLICING, Kind, is_dear_to_xla
from passes.jaxpr.purity import has_effect, kernel_kind, moves_memory
from passes.jaxpr.simplify import without_literal_barriers
from passes.jaxpr.softmax import DataflowGraph, inside_softmax
from passes.jaxpr.split_dots import split_bytes, split_ns
from passes.jaxpr.stored import read_rounded, stored_bytes
from passes.jaxpr.together import Together
from passes.simulate import simulate

# Set by `benchmarks.gpt12`. A value with several readers is stored if reading its leaves costs more than this
# many times its own bytes; one with a single reader, which fuses it, only where a chain keeps many alive.
SEVERAL_READERS_RATIO = 1.5
ONE_READER_RATIO = 2.5
# XLA:GPU stores an expensive value for several readers, unless reading its leaves is that much cheaper.
SHARED_RATIO = 0.75
# A slice that a scan takes from a stack or puts on one is read once and written once for it.
SLICE_PASSES = 2
# Kernels whose operands are in memory.
_WHOLE = (Kind.KERNEL, Kind.FOREIGN, Kind.OPAQUE)


def lift(
    jaxpr: Jaxpr,
    device: DeviceModel,
    *,
    as_xla: bool,
    rounded: bool = False,
    carried: tuple[int, int] | None = None,
) -> LiftedJaxpr:
    """Lift an open jaxpr (calls inlined, dead code removed) for one kind of device.

    Args:
        as_xla: True for what XLA does by itself: on a GPU it stores an expensive elementwise value (exp,
            tanh) that several kernels read, on a CPU any elementwise value that several kernels read, and
            it keeps all terms of a long sum until the end. False for what it can be made to do.
        rounded: True to count what products round in the bytes of that (`passes.jaxpr.stored`).
        carried: of a scan's body how many of its inputs are constants, and carried.

    Complexity: linear in equations times the size of a kernel.
    """
    return _Lift(without_literal_barriers(jaxpr), device, as_xla, rounded, carried).run()


class _Lift:
    """The state of one lift: storage decided on a forward walk, then ops built from the roots."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        device: DeviceModel,
        as_xla: bool,
        rounded: bool,
        carried: tuple[int, int] | None,
    ) -> None:
        self.jaxpr = jaxpr
        self.device = device
        self.as_xla = as_xla
        self.producer: dict[Var, int] = {}
        self.readers: dict[Var, list[int]] = {}
        self.results: set[Var] = set(compat.variables(jaxpr.outvars))
        self.stored: set[Var] = {*jaxpr.constvars, *jaxpr.invars}
        self.kinds: list[Kind] = [kernel_kind(eqn, device.platform) for eqn in jaxpr.eqns]
        self.rounded = read_rounded(jaxpr, self.kinds) if rounded else frozenset[Var]()
        # Results of barriers are views of the variables that they are results for.
        self.original: dict[Var, Var] = {}
        # For every variable: stored variables that it is computed from, with the bytes read of each.
        self.reads: dict[Var, dict[Var, int]] = {}
        self.order: dict[Var, int] = {}
        self.graph = DataflowGraph(
            eqns=jaxpr.eqns, kinds=self.kinds, producer=self.producer, readers=self.readers
        )
        n_consts, n_carry = carried or (0, 0)
        stacks = () if carried is None else compat.variables(jaxpr.outvars[n_carry:])
        self.together = Together(self.kinds, stacks)
        # What is there anyway, and is not written over.
        self.fixed = {*jaxpr.constvars, *jaxpr.invars} - {*jaxpr.invars[n_consts : n_consts + n_carry]}

    def run(self) -> LiftedJaxpr:
        self._index()
        self.vector_flops = list(map(vector_work, self.jaxpr.eqns, self.kinds))
        needed = self._needed_in_memory()
        self.inside = set[Var]()
        if BACKENDS[self.device.platform].fuses_normalisation:
            self.inside = inside_softmax(self.graph, self.results, needed)
        self.kernels = self._reading_kernels(needed)
        for i, eqn in enumerate(self.jaxpr.eqns):
            self._decide(i, eqn, needed)
        return self._build()

    def _index(self) -> None:
        for v in (*self.jaxpr.constvars, *self.jaxpr.invars):
            self.order[v] = len(self.order)
            self.reads[v] = {v: compat.aval_nbytes(v.aval)}
        for i, eqn in enumerate(self.jaxpr.eqns):
            for v in compat.variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)
            for v in eqn.outvars:
                self.producer[v] = i
                self.order[v] = len(self.order)

    def _needed_in_memory(self) -> set[Var]:
        """Variables that some kernel reads from memory, looking through views."""
        needed = set(self.results)
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn, kind = self.jaxpr.eqns[i], self.kinds[i]
            if kind in (*_WHOLE, Kind.BARRIER) or (
                kind is Kind.VIEW and any(v in needed for v in eqn.outvars)
            ):
                needed.update(compat.variables(eqn.invars))
        return needed

    def _reading_kernels(self, needed: set[Var]) -> dict[Var, frozenset[int]]:
        """For every variable up to two of the kernels that would read it if only `needed` were stored."""
        kernels: dict[Var, frozenset[int]] = {}
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[i]
            joins = self.kinds[i] in (Kind.VIEW, Kind.FUSIBLE) or self.inside & {*eqn.outvars}
            own = not joins or any(v in needed for v in eqn.outvars)
            reading = [i] if own else sorted({k for v in eqn.outvars for k in kernels.get(v, ())})
            for v in compat.variables(eqn.invars):
                kernels[v] = frozenset(sorted({*kernels.get(v, ()), *reading})[:2])
        return kernels

    def _decide(self, i: int, eqn: JaxprEqn, needed: set[Var]) -> None:
        kind = self.kinds[i]
        if kind is Kind.BARRIER:
            for operand, result in zip(compat.variables(eqn.invars), eqn.outvars, strict=True):
                self.original[result] = self.original.get(operand, operand)
                self.reads[result] = self.reads[operand]
                self.stored.add(result)
            return
        reads = self._kernel_reads(eqn)
        # Results of one equation are stored together or not at all.
        stored = any(self._is_stored(i, eqn, kind, v, reads, needed) for v in eqn.outvars)
        for v in eqn.outvars:
            if stored:
                self.stored.add(v)
                self.reads[v] = {v: compat.aval_nbytes(v.aval)}
            else:
                self.reads[v] = reads

    def _is_stored(
        self, i: int, eqn: JaxprEqn, kind: Kind, v: Var, reads: dict[Var, int], needed: set[Var]
    ) -> bool:
        readers = self.readers.get(v, [])
        if v in self.results:
            return True
        if v in self.inside:
            return False
        if kind in (*_WHOLE, Kind.REDUCTION):
            return not self._is_epilogue(i, v, readers)
        if v in needed and (kind is not Kind.VIEW or self._is_held(readers)):
            return True
        if any(self._is_unstored_kernel(u) for u in compat.variables(eqn.invars)):
            return True
        if kind is Kind.VIEW:
            return False
        nbytes, traffic = max(compat.aval_nbytes(v.aval), 1), sum(reads.values())
        if len(self.kernels.get(v, ())) > 1:
            return self._shares(eqn, v, traffic) or traffic > SEVERAL_READERS_RATIO * nbytes
        if self.as_xla:
            return False
        # Arguments are there anyway.
        kept = [n for leaf, n in reads.items() if leaf in self.producer]
        return len(kept) > 2 and sum(kept) > ONE_READER_RATIO * nbytes

    def _shares(self, eqn: JaxprEqn, v: Var, traffic: int) -> bool:
        """True if XLA by itself stores an elementwise value that several kernels read."""
        if not self.as_xla or traffic == 0:
            return False
        if BACKENDS[self.device.platform].stores_shared:
            return True
        costly = traffic > SHARED_RATIO * compat.aval_nbytes(v.aval) or self.graph.is_normalised(v)
        return costly and is_dear_to_xla(eqn.primitive.name, str(array_of(v).dtype))

    def _is_held(self, readers: Sequence[int]) -> bool:
        """True for a value that a barrier reads."""
        return any(self.kinds[i] is Kind.BARRIER for i in readers)

    def _is_unstored_kernel(self, v: Var) -> bool:
        """True for a kernel's result that is stored only in the form that its one reader gives it."""
        i = self.producer.get(v)
        if i is None or v in self.stored or v in self.inside:
            return False
        return self.kinds[i] in (Kind.KERNEL, Kind.REDUCTION)

    def _is_epilogue(self, i: int, v: Var, readers: Sequence[int]) -> bool:
        """True for a kernel's wide result that its one reader converts to something narrower."""
        sealed = self.kinds[i] in (Kind.OPAQUE, Kind.FOREIGN)
        if len(readers) != 1 or len(self.jaxpr.eqns[i].outvars) != 1 or sealed:
            return False
        reader = self.jaxpr.eqns[readers[0]]
        if reader.primitive.name != "convert_element_type":
            return False
        return compat.aval_nbytes(reader.outvars[0].aval) < compat.aval_nbytes(v.aval)

    def _build(self) -> LiftedJaxpr:
        roots = [i for i in range(len(self.jaxpr.eqns)) if self._is_root(i)]
        bodies = {root: self._body(root) for root in roots}
        if not self.original:
            roots = self._as_late_as_free(roots, bodies)
        buffer_of: dict[Var, BufferId] = {}
        var_of: list[Var] = []
        for v in (*self.jaxpr.constvars, *self.jaxpr.invars):
            buffer_of[v] = BufferId(len(var_of))
            var_of.append(v)
        for root in roots:
            for v in self.jaxpr.eqns[root].outvars:
                if not isinstance(v, compat.DropVar):
                    buffer_of[v] = BufferId(len(var_of))
                    var_of.append(v)
        for result, original in self.original.items():
            if not isinstance(result, compat.DropVar):
                buffer_of[result] = buffer_of[original]
        last_names = (self.original.get(v, v) for v in self.results)
        results = result_storage(last_names, self.jaxpr, self.producer, self.readers)
        fixed = {*self.jaxpr.constvars, *self.jaxpr.invars, *results}
        nbytes = [0 if v in fixed else stored_bytes(v, self.device, self.rounded) for v in var_of]
        buffers = tuple(Buffer(id=BufferId(b), nbytes=nbytes[b], name=str(v)) for b, v in enumerate(var_of))
        leaves = tuple(
            tuple(sorted(buffer_of[leaf] for leaf in self._eqn_reads(eqn))) for eqn in self.jaxpr.eqns
        )
        ops = tuple(
            self._op(OpId(k), root, bodies[root], buffer_of, leaves[root]) for k, root in enumerate(roots)
        )
        program = Program.build(
            name="jaxpr",
            ops=ops,
            buffers=buffers,
            outputs=tuple(sorted({buffer_of[v] for v in self.results})),
        )
        return LiftedJaxpr(
            program=program,
            jaxpr=self.jaxpr,
            bodies=tuple(bodies[root] for root in roots),
            leaves=leaves,
            buffer_of=buffer_of,
            var_of=tuple(var_of),
        )

    def _is_root(self, i: int) -> bool:
        eqn = self.jaxpr.eqns[i]
        if self.kinds[i] is Kind.OPAQUE or has_effect(eqn):
            return True
        if self.kinds[i] is Kind.BARRIER:
            return False
        return any(v in self.stored for v in eqn.outvars)

    def _eqn_reads(self, eqn: JaxprEqn) -> dict[Var, int]:
        reads: dict[Var, int] = {}
        for v in compat.variables(eqn.invars):
            reads.update(self.reads[v])
        return reads

    def _body(self, root: int) -> tuple[int, ...]:
        """The equations of one kernel: the root and the virtual ones that it reads, in order."""
        body, stack = {root}, [root]
        while stack:
            for v in compat.variables(self.jaxpr.eqns[stack.pop()].invars):
                i = self.producer.get(v)
                if i is not None and v not in self.stored and i not in body:
                    body.add(i)
                    stack.append(i)
        return tuple(sorted(body))

    def _as_late_as_free(self, roots: list[int], bodies: dict[int, tuple[int, ...]]) -> list[int]:
        """Move a fusible op to just before its first reader where its leaves are alive until then."""
        reads = {root: self._eqn_reads(self.jaxpr.eqns[root]) for root in roots}
        readers: dict[Var, list[int]] = {}
        for root in roots:
            for leaf in reads[root]:
                readers.setdefault(leaf, []).append(root)
        arguments = {*self.jaxpr.constvars, *self.jaxpr.invars}
        place: dict[int, tuple[float, int]] = {}
        for root in reversed(roots):
            place[root] = (float(root), root)
            eqn = self.jaxpr.eqns[root]
            if self.kinds[root] not in (Kind.FUSIBLE, Kind.VIEW) or has_effect(eqn):
                continue
            if any(v in self.results or v not in readers for v in eqn.outvars):
                continue
            first = min(place[r] for v in eqn.outvars for r in readers[v])
            # Its leaves' readers before it have no place yet; those keep theirs or move towards it.
            lasts = [max(readers[leaf]) for leaf in reads[root] if leaf not in arguments]
            if all(last > root and place[last] >= first for last in lasts):
                place[root] = (first[0] - 1e-4, root)
        return sorted(roots, key=place.__getitem__)

    def _op(
        self,
        op_id: OpId,
        root: int,
        body: tuple[int, ...],
        buffer_of: dict[Var, BufferId],
        leaves: tuple[BufferId, ...],
    ) -> Op:
        eqn = self.jaxpr.eqns[root]
        outvars = [v for v in eqn.outvars if not isinstance(v, compat.DropVar)]
        opaque = any(self.kinds[i] is Kind.OPAQUE or has_effect(self.jaxpr.eqns[i]) for i in body)
        reads, joined = self._kernel_reads(eqn), False
        # A planner may run each of them again alone.
        if self.as_xla and BACKENDS[self.device.platform].reads_together:
            reads, joined = self.together.unread(root, eqn, reads)
        inside = eqn.primitive.name in CONTROL_FLOW
        cost_ns, energy_pj = (
            self._inner_cost(eqn) if inside else self._kernel_cost(root, body, outvars, reads, joined)
        )
        return Op(
            id=op_id,
            inputs=leaves,
            outputs=tuple(buffer_of[v] for v in outvars),
            cost_ns=cost_ns,
            recomputable=not opaque,
            may_share=self._may_share(root, outvars, buffer_of, leaves),
            workspace_bytes=sum(self._workspace(self.jaxpr.eqns[i]) for i in body),
            name=eqn.primitive.name,
            source=compat.source_line(eqn),
            energy_pj=energy_pj,
        )

    def _kernel_cost(
        self, root: int, body: tuple[int, ...], outvars: Sequence[Var], reads: dict[Var, int], joined: bool
    ) -> tuple[int, int]:
        """Time and energy of one kernel, the time of what it sends to other devices, too; a copy to or from
        the host is none.

        Args:
            reads: what it reads, but for what another kernel that XLA joins it to has read.
            joined: True if there is one.
        """
        eqn = self.jaxpr.eqns[root]
        if moves_memory(eqn):
            return 0, 0
        is_saved = compat.checkpoint_name_of(eqn) is not None and self.kinds[root] is Kind.OPAQUE
        nbytes = said_bytes(eqn)
        if nbytes is None:
            # What makes the part writes it, too, as it does the slice of a scan's stack.
            joined |= (updates := self._is_update(eqn))
            written = [eqn.invars[UPDATES[eqn.primitive.name]]] if updates else outvars
            nbytes = sum(reads.values()) + sum(compat.aval_nbytes(v.aval) for v in written)
        nbytes = 0 if is_saved else nbytes
        flops, bits = matrix_work([self.jaxpr.eqns[i] for i in body if self.kinds[i] in _WHOLE])
        vector_flops = sum(self.vector_flops[i] for i in body)
        kernel = kernel_ns(
            self.device, nbytes=nbytes, matrix_flops=flops, bits=bits, vector_flops=vector_flops
        )
        kernel -= self.device.launch_ns if joined else 0
        kernel += sum(split_ns(self.jaxpr.eqns[i], self.device) for i in body)
        kernel += round(1e9 * sent_bytes(eqn) / self.device.link_bytes_per_second)
        return kernel, kernel_pj(self.device, nbytes=nbytes, matrix_flops=flops, bits=bits)

    def _kernel_reads(self, eqn: JaxprEqn) -> dict[Var, int]:
        """The stored variables that a kernel reads, with the bytes of each: a slice as many as it gives."""
        reads: dict[Var, int] = {}
        slices, updates = eqn.primitive.name in SLICING, self._is_update(eqn)
        for position, v in enumerate(eqn.invars):
            if isinstance(v, compat.Literal) or (updates and not position):
                continue
            limit = sum(compat.aval_nbytes(o.aval) for o in eqn.outvars) if slices and not position else None
            for leaf, nbytes in self.reads[v].items():
                reads[leaf] = max(reads.get(leaf, 0), nbytes if limit is None else min(nbytes, limit))
        return reads

    def _is_update(self, eqn: JaxprEqn) -> bool:
        """True for a kernel that writes a part of its first operand, which nothing else reads, in place."""
        if eqn.primitive.name not in UPDATES:
            return False
        v = eqn.invars[0]
        kept = v in self.fixed or v in self.results
        return compat.is_variable(v) and not kept and len(self.readers[v]) == 1

    def _may_share(
        self, root: int, outvars: Sequence[Var], buffer_of: dict[Var, BufferId], leaves: tuple[BufferId, ...]
    ) -> tuple[tuple[BufferId, BufferId], ...]:
        """An elementwise kernel may write over an operand of the same shape and type that dies with it."""
        eqn = self.jaxpr.eqns[root]
        kept = self.fixed | self.results
        if eqn.primitive.name == "scan":
            return carries_shared(eqn, buffer_of, kept)
        if self.kinds[root] is Kind.FOREIGN:
            return aliased(eqn, buffer_of, kept)
        if self.kinds[root] is not Kind.FUSIBLE and eqn.primitive.name not in IN_PLACE:
            return ()
        kept |= self.reads.keys() - self.rounded if self.rounded & {*outvars} else self.rounded
        free = {v: b for v in self._eqn_reads(eqn) if v not in kept and (b := buffer_of[v]) in leaves}
        return written_over(outvars, free, buffer_of)

    def _workspace(self, eqn: JaxprEqn) -> int:
        """The inner peak of control flow: of its largest body; the parts of a product that XLA splits."""
        bodies = _works(eqn, self.device) if eqn.primitive.name in CONTROL_FLOW else []
        return max((work.peak_bytes for work in bodies), default=split_bytes(eqn, self.device))

    def _inner_cost(self, eqn: JaxprEqn) -> tuple[int, int]:
        """Time and energy of control flow: of its dearest body, as often as it is known to run."""
        dearest = max(_works(eqn, self.device), key=lambda work: work.cost_ns, default=NO_WORK)
        cost_ns, energy_pj = (iterations_of(eqn) * once for once in (dearest.cost_ns, dearest.energy_pj))
        if eqn.primitive.name != "scan":
            return cost_ns, energy_pj
        n_consts, n_carry = compat.scan_sizes(eqn)
        stacks = [*eqn.invars[n_consts + n_carry :], *eqn.outvars[n_carry:]]
        moved = SLICE_PASSES * sum(compat.aval_nbytes(v.aval) for v in stacks)
        cost_ns += round(1e9 * moved / self.device.bytes_per_second)
        return cost_ns, energy_pj + kernel_pj(self.device, nbytes=moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerWork:
    """One run of a body of control flow: its peak of temporaries, results counted too, time and energy."""

    peak_bytes: int
    cost_ns: int
    energy_pj: int


NO_WORK = InnerWork(peak_bytes=0, cost_ns=0, energy_pj=0)


def _works(eqn: JaxprEqn, device: DeviceModel) -> list[InnerWork]:
    """What the bodies of one equation of control flow need."""
    carried = compat.scan_sizes(eqn) if eqn.primitive.name == "scan" else None
    return [inner_work(body, device, carried) for body in compat.inner_jaxprs(eqn)]


@compat.cached_by_jaxpr
def inner_work(jaxpr: Jaxpr, device: DeviceModel, carried: tuple[int, int] | None = None) -> InnerWork:
    """What one run of a body of control flow needs, as XLA runs it by itself.

    Args:
        carried: of a scan's body how many of its inputs are constants, and carried.
    """
    flat = compat.open_jaxpr(inline_calls(compat.close_jaxpr(jaxpr, [])))[0] if not jaxpr.constvars else jaxpr
    lifted = lift(flat, device, as_xla=True, carried=carried)
    program = lifted.program
    in_place = updated_in_place(lifted, *(carried or (0, 0)))
    results = sum(stored_bytes(v, device) for k, v in enumerate(flat.outvars) if k not in in_place)
    peak_bytes = simulate(program, tuple(op.id for op in program.ops)).peak_bytes
    return InnerWork(
        peak_bytes=int(peak_bytes) + results, cost_ns=program.cost_ns, energy_pj=program.energy_pj
    )
