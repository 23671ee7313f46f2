"""Lift a jaxpr to a `Program`, knowing what XLA fuses.

A jaxpr names every intermediate value, XLA stores few of them (`passes.jaxpr.storage`): elementwise chains
are computed inside the kernels that read them. What is stored becomes a buffer; the body of an op holds all
equations that are computed inside its kernel, and its inputs are the stored values that they read (leaves).

Invariant: every equation with a use or an effect is in some op's body; the bodies of two ops may share
virtual equations; an op's last equation is the only one whose results are stored.

What it does not do: control flow is one opaque kernel whose inner peak counts as workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.canonical import with_canonical_products
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.extremes import masked_by_results
from passes.jaxpr.flops import iterations_of
from passes.jaxpr.hoisted import hoisted
from passes.jaxpr.in_place import (
    IN_PLACE,
    aliased,
    carries_shared,
    result_storage,
    updated_in_place,
    written_over,
)
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.interned import interned
from passes.jaxpr.joined import joined
from passes.jaxpr.kernel_costs import KernelCosts
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.merged_dots import with_merged_dots
from passes.jaxpr.moved import moved
from passes.jaxpr.primitives import CONTROL_FLOW, Kind
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rolled_bits import is_in_words, state_bytes, word_bytes
from passes.jaxpr.simplify import (
    with_converted_operands,
    with_wide_operands,
    without_literal_barriers,
    without_repeats,
    without_rounding,
)
from passes.jaxpr.slices import filling, with_slices
from passes.jaxpr.split_dots import split_bytes
from passes.jaxpr.split_sums import read_in_parts
from passes.jaxpr.storage import Storage
from passes.jaxpr.stored import read_rounded, stored_bytes
from passes.jaxpr.together import Group, Together
from passes.jaxpr.vector_dots import with_multiplied_vectors
from passes.reach import reached
from passes.simulate import Timeline, simulate


def lift(
    jaxpr: Jaxpr,
    device: DeviceModel,
    *,
    as_xla: bool,
    rounded: bool = False,
) -> LiftedJaxpr:
    """Lift an open jaxpr (calls inlined, dead code removed) for one kind of device.

    Args:
        as_xla: True for what XLA does by itself: on a GPU it stores an expensive elementwise value (exp,
            tanh) that several kernels read, on a CPU what `passes.jaxpr.greedy_fusion` says, and it keeps
            all terms of a long sum until the end. False for what it can be made to do.
        rounded: True to count what products round in the bytes of that (`passes.jaxpr.stored`).

    Complexity: linear in equations times the size of a kernel.
    """
    return lift_known(as_known(jaxpr, device), device, as_xla=as_xla, rounded=rounded)


def lift_known(
    jaxpr: Jaxpr,
    device: DeviceModel,
    *,
    as_xla: bool,
    rounded: bool = False,
) -> LiftedJaxpr:
    """As `lift`, of what `as_known` returns."""
    built, kernel_of = _lift(jaxpr, device, as_xla, rounded)
    lifted = _in_order(built, device, as_xla)
    if not as_xla:
        return lifted
    if (seen := _as_seen(jaxpr, device)) is not jaxpr:
        built, kernel_of = _lift(seen, device, as_xla, rounded)
    one = joined(built, kernel_of)
    if one is built and seen is jaxpr:
        return lifted
    return replace(lifted, as_seen=_in_order(one, device, as_xla))


def lift_seen(
    jaxpr: Jaxpr, device: DeviceModel, *, rounded: bool = False, carried: tuple[int, int] | None = None,
    held: bool = False,
) -> LiftedJaxpr:  # fmt: skip
    """Lift what XLA sees of an open jaxpr: `seen` of `lift(..., as_xla=True)`.

    Args:
        carried: of a scan's body how many of its inputs are constants, and carried. Its other results are
            slices of stacks, which take memory until they are copied there.
        held: in the order of a program that is held to a budget: where XLA's own order does not keep it, the
            enforcing stage puts it in that one.
    """
    seen = _as_seen(as_known(jaxpr, device), device)
    reordered = held and BACKENDS[device.platform].runs_branches_together
    return _in_order(joined(*_lift(seen, device, True, rounded, carried)), device, as_xla=not reordered)


def as_known(jaxpr: Jaxpr, device: DeviceModel) -> Jaxpr:
    """An open jaxpr as what XLA makes of it is foreseen.

    Where all of XLA's fusion is, the broadcasts that equations imply are written out, and what is computed
    twice is computed once. Elsewhere repeats are planned apart: they are left out only of what is expected.
    Products keep their form in what XLA has yet to partition: it does not see through a dimension that joins
    two, and gathers the whole on every device (a sharded Llama: four more gathers, and a tenth of its time).
    """
    backend = BACKENDS[device.platform]
    if not backend.rounds_products:
        jaxpr = masked_by_results(jaxpr)
    converted = with_converted_operands(hoisted(without_literal_barriers(jaxpr), device), backend)
    jaxpr = with_multiplied_vectors(converted, device)
    if not backend.fuses_greedily:
        return without_rounding(jaxpr) if backend.drops_rounding else jaxpr
    known = without_repeats(with_wide_operands(jaxpr))  # a product's form depends on how many read it
    if device.partitioned or (canonical := with_canonical_products(known, device)) is known:
        return known
    return without_repeats(canonical)


def _as_seen(known: Jaxpr, device: DeviceModel) -> Jaxpr:
    backend = BACKENDS[device.platform]
    seen = known if backend.fuses_greedily else without_repeats(known)
    if device.partitioned or not backend.merges_dots_bytes:
        return seen
    return with_merged_dots(seen, backend.merges_dots_bytes)


def _lift(
    jaxpr: Jaxpr,
    device: DeviceModel,
    as_xla: bool,
    rounded: bool,
    carried: tuple[int, int] | None = None,
) -> tuple[LiftedJaxpr, Mapping[int, Group]]:
    """Kernels in the order of the program, and which are made one, by their last equations."""
    storage = Storage(jaxpr, device, as_xla=as_xla, carried=carried)
    work = _Lift(storage, device, as_xla=as_xla, rounded=rounded, carried=carried)
    return work.build(), work.costs.kernel_of


def _in_order(lifted: LiftedJaxpr, device: DeviceModel, as_xla: bool) -> LiftedJaxpr:
    """XLA:CPU makes early what it could make just before it is read."""
    return moved(lifted, late=not (as_xla and BACKENDS[device.platform].fuses_greedily))


class _Lift:
    """The state of one lift: ops built from the roots."""

    def __init__(
        self,
        storage: Storage,
        device: DeviceModel,
        *,
        as_xla: bool,
        rounded: bool,
        carried: tuple[int, int] | None,
    ) -> None:
        self.storage = storage
        self.jaxpr, self.kinds, self.results = storage.jaxpr, storage.kinds, storage.results
        self.device, self.as_xla = device, as_xla
        self.rounded = read_rounded(self.jaxpr, self.kinds) if rounded else frozenset[Var]()
        stacks = () if carried is None else compat.variables(self.jaxpr.outvars[carried[1] :])
        kept = () if carried is None else compat.variables(self.jaxpr.outvars[: carried[1]])
        self.stacked = {*stacks}.difference(kept)
        self.stacks = frozenset(stacks)
        self.kept = storage.fixed | self.results

    def build(self) -> LiftedJaxpr:
        roots = [i for i in range(len(self.jaxpr.eqns)) if self._is_root(i)]
        bodies = {root: self._body(root) for root in roots}
        self.in_parts = read_in_parts(self.storage, roots, self.device)
        # A planner may run each kernel again alone.
        joins = self.as_xla and BACKENDS[self.device.platform].reads_together
        together = None
        if joins:
            storage = self.storage
            together = Together(storage.graph, storage.stored, self.stacks, storage.inside_softmax)
        self.costs = KernelCosts(self.storage, self.device, self.in_parts, together)
        buffer_of: dict[Var, BufferId] = {}
        var_of: list[Var] = []
        given = (*self.jaxpr.constvars, *self.jaxpr.invars)
        for v in given:
            buffer_of[v] = BufferId(len(var_of))
            var_of.append(v)
        for root in roots:
            for v in self.jaxpr.eqns[root].outvars:
                if not isinstance(v, compat.DropVar):
                    buffer_of[v] = BufferId(len(var_of))
                    var_of.append(v)
        for result, original in self.storage.original.items():
            if not isinstance(result, compat.DropVar):
                buffer_of[result] = buffer_of[original]
        results = self.results - self.stacked
        last_names = (self.storage.original.get(v, v) for v in results)
        stored = result_storage(last_names, self.jaxpr, self.storage.producer, self.storage.readers)
        fixed = {*given, *stored, *filter(self._is_written_there, self.stacked)}
        fixed -= self.storage.slices
        nbytes = [0 if v in fixed else self._stored_bytes(v) for v in var_of]
        buffers = tuple(Buffer(id=BufferId(b), nbytes=n) for b, n in enumerate(nbytes))
        leaves = tuple(
            tuple(sorted(buffer_of[leaf] for leaf in self.storage.eqn_reads(i)))
            for i in range(len(self.jaxpr.eqns))
        )
        self.last_read = {b: root for root in roots for b in leaves[root]}
        ops = tuple(
            self._op(OpId(k), root, bodies[root], buffer_of, leaves[root]) for k, root in enumerate(roots)
        )
        outputs = tuple(sorted({buffer_of[v] for v in results}))
        program = Program.build(name="jaxpr", ops=ops, buffers=buffers, outputs=outputs)
        return LiftedJaxpr(
            program=program,
            jaxpr=self.jaxpr,
            bodies=tuple(bodies[root] for root in roots),
            leaves=leaves,
            buffer_of=buffer_of,
            var_of=tuple(var_of),
        )

    def _is_written_there(self, v: Var) -> bool:
        """True for a slice of a stack that its kernel computes where it belongs: nothing else reads it."""
        maker = self.storage.producer.get(v)
        return maker is not None and self.kinds[maker] is Kind.FUSIBLE and not self.storage.readers.get(v)

    def _stored_bytes(self, v: Var) -> int:
        """Bytes of a value, of its parts where their readers sum them; a plan may have them summed before."""
        if self.as_xla and v in self.in_parts:
            return split_bytes(self.jaxpr.eqns[self.storage.producer[v]], self.device)
        nbytes = stored_bytes(v, self.device, self.rounded)
        maker = self.storage.producer.get(v)
        if maker is not None and not self._is_joined(v, maker):
            nbytes += word_bytes(self.jaxpr.eqns[maker], self.device)
        return nbytes

    def _is_joined(self, v: Var, maker: int) -> bool:
        """False for random bits all of whose readers compute their operands inside."""
        if not is_in_words(self.jaxpr.eqns[maker]) or v in self.kept:
            return True
        return any(self.kinds[i] is not Kind.FUSIBLE for i in self.storage.readers.get(v, ()))

    def _is_root(self, i: int) -> bool:
        eqn = self.jaxpr.eqns[i]
        if self.kinds[i] is Kind.OPAQUE or has_effect(eqn):
            return True
        if self.kinds[i] is Kind.BARRIER:
            return False
        return any(v in self.storage.stored for v in eqn.outvars)

    def _body(self, root: int) -> tuple[int, ...]:
        """The equations of one kernel: the root and the virtual ones that it reads, in order."""

        def inside(reader: tuple[int, bool]) -> Iterator[tuple[int, bool]]:
            by, from_memory = reader
            for v in self.storage.operands[by]:
                i = self.storage.producer.get(v)
                if i is not None and self.storage.computes(v, from_memory=from_memory):
                    # Through views it reads what they show.
                    yield i, from_memory and self.kinds[i] is Kind.VIEW

        body = reached([(root, self.storage.reads_memory(root))], inside)
        return tuple(sorted({i for i, _ in body}))

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
        cost_ns, energy_pj = self.costs.of_kernel(root, body, outvars)
        if eqn.primitive.name in CONTROL_FLOW:
            cost_ns, energy_pj = self._inner_cost(eqn)
        return Op(
            id=op_id,
            inputs=leaves,
            outputs=tuple(buffer_of[v] for v in outvars),
            cost_ns=cost_ns,
            recomputable=not opaque,
            may_share=self._may_share(root, body, outvars, buffer_of, leaves),
            workspace_bytes=sum(map(self._workspace, body)),
            name=eqn.primitive.name,
            source=compat.source_line(eqn),
            energy_pj=energy_pj,
        )

    def _may_share(
        self,
        root: int,
        body: tuple[int, ...],
        outvars: Sequence[Var],
        buffer_of: dict[Var, BufferId],
        leaves: tuple[BufferId, ...],
    ) -> tuple[tuple[BufferId, BufferId], ...]:
        """An elementwise kernel may write over an operand of the same shape and type that dies with it, but
        for one that computes a softmax; of several over the one that is read by nothing else, or not long."""
        if any(v in self.storage.inside_softmax for i in body for v in self.jaxpr.eqns[i].outvars):
            return ()
        eqn = self.jaxpr.eqns[root]
        if eqn.primitive.name == "scan":
            return carries_shared(eqn, buffer_of, self.kept)
        if self.kinds[root] is Kind.FOREIGN:
            return aliased(eqn, buffer_of, self.kept)
        if self.kinds[root] is not Kind.FUSIBLE and eqn.primitive.name not in IN_PLACE:
            return ()
        rounds = not self.rounded.isdisjoint(outvars)
        alike = (v for v in self.storage.eqn_reads(root) if (v in self.rounded) is rounds)
        free = {v: b for v in alike if v not in self.kept and (b := buffer_of[v]) in leaves}
        free = dict(sorted(free.items(), key=lambda item: self.last_read[item[1]]))
        in_any_layout = BACKENDS[self.device.platform].sharing == "emitters"
        # Several parts of one kernel share its operands out among them.
        most = len(free) if self.costs.joins else 1
        return written_over(outvars, free, buffer_of, in_any_layout=in_any_layout, most=most)

    def _workspace(self, i: int) -> int:
        """The inner peak of control flow: of its largest body, beside the results of a branch; the parts of a
        product that XLA splits; the state of random bits."""
        eqn = self.jaxpr.eqns[i]
        if eqn.primitive.name == "cond":
            return beside_results(eqn, [w.branch_bytes for w in _works(eqn, self.device)], self.device)
        if eqn.primitive.name in CONTROL_FLOW:
            return max((work.peak_bytes for work in _works(eqn, self.device)), default=0)
        summed = not (self.as_xla and any(v in self.in_parts for v in eqn.outvars))
        joined = any(self._is_joined(v, i) for v in eqn.outvars)
        return summed * split_bytes(eqn, self.device) + state_bytes(eqn, self.device, joined=joined)

    def _inner_cost(self, eqn: JaxprEqn) -> tuple[int, int]:
        """Time and energy of control flow: of its dearest body, as often as it is known to run; and of what
        fills a scan's stacks before it."""
        dearest = max(_works(eqn, self.device), key=lambda work: work.cost_ns, default=NO_WORK)
        cost_ns, energy_pj = (iterations_of(eqn) * once for once in (dearest.cost_ns, dearest.energy_pj))
        if eqn.primitive.name != "scan":
            return cost_ns, energy_pj
        fill_ns, fill_pj = filling(eqn.outvars[compat.scan_sizes(eqn)[1] :], self.device)
        return cost_ns + fill_ns, energy_pj + fill_pj


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerWork:
    """One run of a body of control flow.

    Attributes:
        peak_bytes: its peak of temporaries, with all results.
        branch_bytes: the same of a branch, whose results take room when they are made: they are those of its
            surroundings.
        cost_ns, energy_pj: time and energy.
    """

    peak_bytes: int
    branch_bytes: int
    cost_ns: int
    energy_pj: int


NO_WORK = InnerWork(peak_bytes=0, branch_bytes=0, cost_ns=0, energy_pj=0)


def _works(eqn: JaxprEqn, device: DeviceModel) -> list[InnerWork]:
    """What the bodies of one equation of control flow need."""
    return [inner_work(interned(body), device, carried_by(eqn)) for body in compat.inner_jaxprs(eqn)]


def carried_by(eqn: JaxprEqn) -> tuple[int, int] | None:
    """How many inputs of a scan's body are constants, and carried; None for other control flow."""
    return compat.scan_sizes(eqn) if eqn.primitive.name == "scan" else None


@compat.cached_by_jaxpr
def inner_work(jaxpr: Jaxpr, device: DeviceModel, carried: tuple[int, int] | None = None) -> InnerWork:
    """What one run of a body of control flow needs, in the order of the program.

    Args:
        carried: as `carried_by` says.
    """
    lifted, kept_bytes = lift_body(jaxpr, device, carried)
    program = lifted.program
    timeline = simulate(program)
    whole = program
    if carried is not None:
        sliced, all_carried = with_slices(lifted.jaxpr, *carried)
        whole = lift_seen(sliced, device, carried=all_carried).program
    return InnerWork(
        peak_bytes=kept_bytes + timeline.peak_bytes,
        branch_bytes=branch_bytes(lifted, program, timeline, device),
        cost_ns=whole.cost_ns,
        energy_pj=whole.energy_pj,
    )


def branch_bytes(lifted: LiftedJaxpr, run: Program, timeline: Timeline, device: DeviceModel) -> int:
    """The peak of a branch, to which its results come one after the other; what it passes on is there.

    Args:
        run: its program, in the order in which it runs.
        timeline: of that.
    """
    live_bytes = timeline.live_bytes.copy()
    results = dict.fromkeys(compat.variables(lifted.jaxpr.outvars))
    if not len(live_bytes):
        return results_bytes(results, device)
    for v in results:
        made = run.producer[lifted.buffer_of[v]]
        live_bytes[0 if made is None else made :] += stored_bytes(v, device)
    return int(live_bytes.max())


def beside_results(cond: JaxprEqn, branches_bytes: Sequence[int], device: DeviceModel) -> int:
    """What branches of such peaks need beside the results of their `cond`."""
    return max(0, max(branches_bytes) - results_bytes(cond.outvars, device))


def results_bytes(results: Iterable[Atom], device: DeviceModel) -> int:
    """What results of control flow take on a device."""
    return sum(stored_bytes(v, device) for v in results)


def lift_body(jaxpr: Jaxpr, device: DeviceModel, carried: tuple[int, int] | None) -> tuple[LiftedJaxpr, int]:
    """What XLA sees of a body of control flow, and the bytes of its results that wait for its end.

    Args:
        carried: as `carried_by` says.
    """
    flat = compat.open_jaxpr(inline_calls(compat.close_jaxpr(jaxpr, [])))[0] if not jaxpr.constvars else jaxpr
    lifted = lift_seen(flat, device, carried=carried)
    in_place = updated_in_place(lifted, *(carried or (0, 0)))
    kept = flat.outvars if carried is None else flat.outvars[: carried[1]]
    return lifted, sum(stored_bytes(v, device) for k, v in enumerate(kept) if k not in in_place)
