"""What XLA stores of a jaxpr's values, and what it computes inside the kernels that read them.

A value is **stored** if a kernel needs it in memory, if it is a result, or if computing it inside each of its
readers would move more bytes than storing it once. Every other value is **virtual**.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.greedy_fusion import GreedyFusion
from passes.jaxpr.in_place import UPDATES
from passes.jaxpr.primitives import (
    BRANCHES,
    INSIDE,
    MATRIX,
    MOVING,
    SLICING,
    WRITES_SLICE,
    Kind,
    is_dear_to_xla,
    is_expensive,
)
from passes.jaxpr.product_kernels import ProductKernels
from passes.jaxpr.purity import kernel_kind
from passes.jaxpr.softmax import DataflowGraph, Softmaxes, find_softmaxes
from passes.jaxpr.split_dots import split_bytes

# A value with several readers is stored if reading its leaves costs more than this many times its own bytes:
# for two, as much as to write it once and to read it twice (`Storage._traffic_stored` says where XLA counts
# more). One with a single reader, which fuses it, is stored only where a chain keeps many alive (set by
# `benchmarks.gpt12`). What a reader reads anyway is free.
SEVERAL_READERS_RATIO = 1.5
ONE_READER_RATIO = 2.5
# A kernel of more equations than that is looked at no further for what it reads anyway.
MOST_INSIDE = 256
# XLA:GPU stores an expensive value for several readers, unless reading its leaves is that much cheaper.
SHARED_RATIO = 0.75
# Where a softmax's rows are fewer for each core, or padded to more, XLA:GPU stores what they are widened to.
_ROWS_PER_CORE = 512
_MOST_PADDED = 7 / 6
# Kernels whose operands are in memory.
WHOLE = (Kind.KERNEL, Kind.FOREIGN, Kind.OPAQUE)


class Storage:
    """What is stored of an open jaxpr's values, decided on a forward walk.

    Attributes:
        jaxpr: open.
        graph: who makes and who reads its values.
        kinds: what each equation is to the fusion model.
        producer: for every result the equation that makes it.
        readers: for every variable the equations that read it, in order.
        operands: for every equation the variables that it reads.
        results: the jaxpr's.
        fixed: what is there anyway, and is not written over.
        stored: variables that are.
        slices: a scan body's slices of stacks that a kernel reads from memory of their own.
        original: for results of barriers the variables that they are views of.
        reads: for every variable the stored ones that it is computed from, with the bytes read of each.
        inside_softmax: what the kernel of a softmax makes for itself.
        copied: stored variables that kernels compute again which can, instead of reading them.
    """

    def __init__(
        self, jaxpr: Jaxpr, device: DeviceModel, *, as_xla: bool, carried: tuple[int, int] | None
    ) -> None:
        """As `passes.jaxpr.lift.lift`."""
        n_consts, n_carry = carried or (0, 0)
        self.jaxpr = jaxpr
        self.kinds: list[Kind] = [kernel_kind(eqn, device.platform) for eqn in jaxpr.eqns]
        self.graph = DataflowGraph.of(jaxpr, self.kinds)
        self.producer, self.readers = self.graph.producer, self.graph.readers
        self.operands = self.graph.operands
        self.results: set[Var] = set(compat.variables(jaxpr.outvars))
        self.fixed = {*jaxpr.constvars, *jaxpr.invars} - {*jaxpr.invars[n_consts : n_consts + n_carry]}
        self.original: dict[Var, Var] = {}
        self.copied: set[Var] = set()
        # What kernels read which compute a variable themselves; `reads` where it is not here.
        self._inside_reads: dict[Var, dict[Var, int]] = {}
        self._device, self._backend, self._as_xla = device, BACKENDS[device.platform], as_xla
        needed = self._needed_in_memory({})
        self._softmaxes = Softmaxes()
        if self._backend.fuses_normalisation:
            self._softmaxes = find_softmaxes(self.graph, self.results, needed, as_xla=as_xla)
        self.inside_softmax = self._softmaxes.inside
        # What kernels that are foreseen do not store, and what they store instead.
        self._inner: Set[Var] = set[Var]()
        self._ends: Set[Var] = set[Var]()
        if self._backend.fuses_products:
            given = {*jaxpr.constvars, *jaxpr.invars[: n_consts + n_carry if carried else None]}
            products = ProductKernels(
                self.graph, device, results=self.results, given=given, apart=self.inside_softmax
            )
            self._inner, self._ends = products.inner, products.ends
            needed = self._needed_in_memory(products.reads)
        self._greedy = None
        self.slices = set[Var]()
        if as_xla and self._backend.fuses_greedily:
            self.slices = needed.intersection(jaxpr.invars[n_consts + n_carry :] if carried else ())
            self._greedy = GreedyFusion(self.graph, self.results, needed)
            self._inner, self._ends = self._greedy.inner, self._greedy.stored
        self._kernels = self._reading_kernels(needed) if self._greedy is None else {}
        self._several = set[Var]()
        if as_xla and self._backend.fuses_products:
            self._several = self._read_at_several_places(needed)
        self._walk(needed)
        if self._backend.fuses_greedily and not as_xla:
            # Which kernels read a value is known now: it need not be stored for those behind one that is.
            self._kernels = self._reading_kernels(self.stored)
            self._walk(needed)

    def computes(self, v: Var, *, from_memory: bool) -> bool:
        """True for a variable that is computed in a kernel that reads it, maybe `from_memory`."""
        return v not in self.stored or (v in self.copied and not from_memory)

    def eqn_reads(self, i: int) -> dict[Var, int]:
        """The stored variables that equation `i` is computed from, with the bytes of each."""
        reads: dict[Var, int] = {}
        for v in self.operands[i]:
            reads.update(self._operand_reads(i, v))
        return reads

    def kernel_reads(self, i: int) -> dict[Var, int]:
        """The stored variables that the kernel of equation `i` reads, with the bytes of each: a slice as many
        as it gives."""
        if i in self._kernel_reads:
            return self._kernel_reads[i]
        eqn = self.jaxpr.eqns[i]
        reads = self._kernel_reads[i] = {}
        slices, updates = eqn.primitive.name in SLICING, self.is_update(eqn)
        for position, v in enumerate(eqn.invars):
            if isinstance(v, compat.Literal) or (updates and not position):
                continue
            limit = sum(compat.aval_nbytes(o.aval) for o in eqn.outvars) if slices and not position else None
            for leaf, nbytes in self._operand_reads(i, v).items():
                reads[leaf] = max(reads.get(leaf, 0), nbytes if limit is None else min(nbytes, limit))
        return reads

    def is_update(self, eqn: JaxprEqn) -> bool:
        """True for a kernel that writes a part of its first operand, which nothing else reads, in place."""
        if eqn.primitive.name not in UPDATES:
            return False
        v = eqn.invars[0]
        if not compat.is_variable(v) or v in self.fixed or v in self.results:
            return False
        return len(self.readers[v]) == 1

    def _operand_reads(self, i: int, v: Var) -> dict[Var, int]:
        if v not in self._inside_reads or self.reads_memory(i):
            return self.reads[v]
        return self._inside_reads[v]

    def reads_memory(self, i: int) -> bool:
        """True for an equation whose kernel reads from memory what is copied, too."""
        return self._greedy is None or i in self._greedy.from_memory

    def _needed_in_memory(self, products: Mapping[int, Sequence[Var]]) -> set[Var]:
        """Variables that some kernel reads from memory, looking through views.

        Args:
            products: what the kernels of products read, where that is not their operands.
        """
        needed = set(self.results)
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn, kind = self.jaxpr.eqns[i], self.kinds[i]
            if kind in (*WHOLE, Kind.BARRIER) or (
                kind is Kind.VIEW and any(v in needed for v in eqn.outvars)
            ):
                read = compat.variables(eqn.invars[:1]) if self._computes_update(eqn) else self.operands[i]
                needed.update(products.get(i, read))
        return needed

    def _computes_update(self, eqn: JaxprEqn) -> bool:
        """True for a kernel that computes what it writes into its first operand."""
        scatters = self._backend.computes_scattered and eqn.primitive.name.startswith("scatter")
        return scatters or eqn.primitive.name == WRITES_SLICE

    def _reading_kernels(self, needed: set[Var]) -> dict[Var, frozenset[int]]:
        """For every variable up to two of the kernels that would read it if only `needed` were stored."""
        kernels: dict[Var, frozenset[int]] = {}
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[i]
            joins = self.kinds[i] in INSIDE or self.inside_softmax & {*eqn.outvars}
            own = not joins or any(v in needed or v in self._ends for v in eqn.outvars)
            passed = (kernels.get(v, ()) for v in eqn.outvars)
            reading = frozenset((i,)) if own else frozenset[int]().union(*passed)
            for v in self.operands[i]:
                others = kernels.get(v)
                both = reading if others is None or others == reading else others | reading
                kernels[v] = both if len(both) <= 2 else frozenset(sorted(both)[:2])
        return kernels

    def _read_at_several_places(self, needed: set[Var]) -> set[Var]:
        """What kernels would compute at several places, if only `needed` were stored: for readers that take
        elements from elsewhere. Two parts of what is split are two places."""
        places: dict[Var, frozenset[tuple[int, int]]] = {}
        several: set[Var] = set()
        for i in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[i]
            own = self.kinds[i] not in INSIDE or not needed.isdisjoint(eqn.outvars)
            moves = own or eqn.primitive.name in MOVING
            for v in self.operands[i]:
                for k, out in enumerate(eqn.outvars):
                    at = frozenset({(i, k)}) if moves else places.get(out, frozenset())
                    if (others := places.get(v)) is not None:
                        at = at if others == at else others | at
                        if len(at) > 1:
                            several.add(v)
                    places[v] = at if len(at) <= 2 else frozenset(sorted(at)[:2])
        return several

    def _walk(self, needed: set[Var]) -> None:
        """Decide of every value, in order, from the beginning."""
        given = (*self.jaxpr.constvars, *self.jaxpr.invars)
        self.stored = {*given}
        self.reads = {v: {v: compat.aval_nbytes(v.aval)} for v in given}
        self._kernel_reads: dict[int, dict[Var, int]] = {}
        self._branching: set[Var] = set()
        self._undecided: set[Var] = set()
        for i, eqn in enumerate(self.jaxpr.eqns):
            self._decide(i, eqn, needed)

    def _decide(self, i: int, eqn: JaxprEqn, needed: set[Var]) -> None:
        kind = self.kinds[i]
        if kind is Kind.BARRIER:
            for operand, result in zip(self.operands[i], eqn.outvars, strict=True):
                self.original[result] = self.original.get(operand, operand)
                self.reads[result] = self.reads[operand]
                self.stored.add(result)
            return
        reads = self.kernel_reads(i)
        # Results of one equation are stored together or not at all.
        known = {v: self._is_known_stored(i, eqn, kind, v, reads, needed) for v in eqn.outvars}
        stored = any(known.values())
        weighed = [v for v, is_known in known.items() if is_known is None and self._is_read_often(v, reads)]
        if weighed and not stored and self._is_for_one(eqn) and not self._takes_much(weighed[0], reads):
            self._undecided.update(eqn.outvars)
        elif weighed:
            stored = True
        elif not stored:
            reads = self._with_operands_stored(i, reads)
        branches = eqn.primitive.name in BRANCHES or not self._branching.isdisjoint(self.operands[i])
        if branches and not stored:
            # XLA:GPU computes what branches at one place of a kernel.
            inside = kind is not Kind.FUSIBLE or not self._inner.isdisjoint(eqn.outvars)
            stored = not inside and not self._several.isdisjoint(eqn.outvars)
            self._branching.update(() if stored else eqn.outvars)
        for v in eqn.outvars:
            if stored:
                self.stored.add(v)
                self.reads[v] = {v: compat.aval_nbytes(v.aval)}
                if self._greedy is not None and v in self._greedy.copied and kind is Kind.FUSIBLE:
                    self.copied.add(v)
                    self._inside_reads[v] = reads
            elif kind is Kind.VIEW and self._greedy is not None:
                self.reads[v] = {k: n for u in self.operands[i] for k, n in self.reads[u].items()}
                self._inside_reads[v] = reads
            else:
                self.reads[v] = reads

    def _is_for_one(self, eqn: JaxprEqn) -> bool:
        """True for what one elementwise equation alone reads. XLA computes it there, and then weighs whether
        to store what that makes: no mask is stored for a gradient that is."""
        readers = [r for v in eqn.outvars for r in self.readers.get(v, ())]
        return len(readers) == 1 and self.kinds[readers[0]] is Kind.FUSIBLE

    def _with_operands_stored(self, i: int, reads: dict[Var, int]) -> dict[Var, int]:
        """What the kernels read that compute equation `i`, whose result is not stored: what it alone reads
        then is, if that is worth it."""
        operands = self._undecided.intersection(self.operands[i])
        if not operands:
            return reads
        self.stored |= operands
        self.reads.update({v: {v: compat.aval_nbytes(v.aval)} for v in operands})
        del self._kernel_reads[i]
        return self.kernel_reads(i)

    def _is_known_stored(
        self, i: int, eqn: JaxprEqn, kind: Kind, v: Var, reads: dict[Var, int], needed: set[Var]
    ) -> bool | None:
        """Whether a value is stored; None where that is weighed, as several kernels read it."""
        readers = self.readers.get(v, [])
        if v in self.results:
            return True
        if v in self.inside_softmax:
            # Stored exponentials are read by kernels of other kinds.
            return (
                self._as_xla and kind is Kind.REDUCTION and not self._softmaxes.exponentials.isdisjoint(reads)
            )
        if v in self._inner or v in self._ends:
            return v in self._ends
        if kind in (*WHOLE, Kind.REDUCTION):
            return not self._is_epilogue(i, v, readers)
        is_held = any(self.kinds[r] is Kind.BARRIER for r in readers)
        if v in needed and (kind is not Kind.VIEW or is_held):
            return True
        if any(self._is_unstored_kernel(u) for u in self.operands[i]):
            return True
        if kind is Kind.VIEW or self._greedy is not None:
            return False
        if len(self._kernels.get(v, ())) > 1:
            return (self._shares(eqn, v, sum(reads.values())) and not self._is_for_one_kernel(v)) or None
        return self._takes_much(v, reads)

    def _is_read_often(self, v: Var, reads: dict[Var, int]) -> bool:
        """True if more would be read for a value in several kernels than is stored and read of it."""
        kernels = sorted(self._kernels[v])
        # On a TPU XLA counts all that it is computed from. Counted as on GPUs, of an LSTM's step that was
        # planned for 8.6 MiB XLA made 11.5; it cost 64 % more within half of its bytes, not 25.
        counts_all = self._backend.fuses_results
        more = (reads if counts_all else self._only_for(v, reads, kernel) for kernel in kernels)
        nbytes = max(compat.aval_nbytes(v.aval), 1)
        return sum(sum(only.values()) for only in more) > self._traffic_stored(nbytes, reads, kernels)

    def _takes_much(self, v: Var, reads: dict[Var, int]) -> bool:
        """True if several stored values, much larger than `v`, would wait for a kernel that computes it of
        them; XLA does not ask. Arguments are there anyway."""
        if self._as_xla:
            return False
        kept = {leaf: n for leaf, n in reads.items() if leaf in self.producer}
        most_bytes = ONE_READER_RATIO * max(compat.aval_nbytes(v.aval), 1)
        if len(kept) <= 2 or sum(kept.values()) <= most_bytes:
            return False
        kernels = self._kernels.get(v)
        only = self._only_for(v, kept, min(kernels)) if kernels else kept
        return sum(only.values()) > most_bytes

    def _traffic_stored(self, nbytes: int, reads: Mapping[Var, int], kernels: Sequence[int]) -> float:
        """How many bytes read inside of `kernels` are worth storing a value: by XLA:GPU's own sum those of
        one more launch, of what it is computed from, of writing it, and of reading it in each of them.

        A tie goes to the readers: each gradient of a residual sum is three terms, which wait for the next.
        Of a LoRA on frozen weights, planned with such sums stored, XLA for an H200 made 31 % more bytes, and
        it cost 5 % more than by hand. What reductions read XLA stores earlier, as compared with its modules.
        """
        launch_ns = self._backend.launch_ns
        if launch_ns is None or any(self.kinds[kernel] is Kind.REDUCTION for kernel in kernels):
            return SEVERAL_READERS_RATIO * nbytes * len(kernels)
        launch_bytes = launch_ns * self._device.bytes_per_second / 1e9
        return sum(reads.values()) + nbytes * (1 + len(kernels)) + launch_bytes

    def _only_for(self, v: Var, reads: Mapping[Var, int], kernel: int) -> dict[Var, int]:
        """What of `reads` the kernel of equation `kernel` reads only to compute `v`."""
        only, stack, seen = dict(reads), [kernel], {kernel}
        while stack and only and len(seen) < MOST_INSIDE:
            for u in self.operands[stack.pop()]:
                if u is v:
                    continue
                if u in self.reads:
                    for leaf in self.reads[u]:
                        only.pop(leaf, None)
                elif (i := self.producer[u]) not in seen and self.kinds[i] in INSIDE:
                    seen.add(i)
                    stack.append(i)
        return only

    def _shares(self, eqn: JaxprEqn, v: Var, traffic: int) -> bool:
        """True if XLA by itself stores an elementwise value that several kernels read."""
        if not self._as_xla:
            return False
        is_dear = is_dear_to_xla(eqn.primitive.name, dtype_name(v))
        if traffic == 0:
            return is_dear and array_of(v).size > 1
        nbytes = compat.aval_nbytes(v.aval)
        if is_dear:
            return traffic > SHARED_RATIO * nbytes or self.graph.row_length(v) is not None
        is_widened = is_expensive(eqn.primitive.name) and traffic < nbytes
        return is_widened and self._is_of_few_rows(v)

    def _is_for_one_kernel(self, v: Var) -> bool:
        """True if XLA makes one kernel of those that compute an elementwise value, and so does not store it:
        of elementwise ones of which neither follows from the other, and whose results no sum takes in. The
        gradient of a GELU and the GELU that is run again for it are one."""
        first, last = sorted(self._kernels[v])
        are_elementwise = all(self.kinds[k] is Kind.FUSIBLE for k in (first, last))
        if not (self._backend.reads_together and are_elementwise) or last - first > MOST_INSIDE:
            return False
        summed = [r for u in self.jaxpr.eqns[last].outvars for r in self.readers.get(u, ())]
        if any(self.kinds[r] is Kind.REDUCTION for r in summed):
            return False
        following = {*self.jaxpr.eqns[first].outvars}
        for k in range(first + 1, last + 1):
            if not following.isdisjoint(self.operands[k]):
                following.update(self.jaxpr.eqns[k].outvars)
        return following.isdisjoint(self.jaxpr.eqns[last].outvars)

    def _is_of_few_rows(self, v: Var) -> bool:
        """True for values of a softmax whose rows do not fill the device, or the tiles that they are read in.

        Seen with rows of 128 to 2048 numbers that are converted from bfloat16 (`tests/test_jaxpr_lift.py`).
        """
        length = self.graph.row_length(v)
        if length is None:
            return False
        rows, tile = array_of(v).size // length, 1 << (length - 1).bit_length()
        return rows <= _ROWS_PER_CORE * self._device.cores or tile > _MOST_PADDED * length

    def _is_unstored_kernel(self, v: Var) -> bool:
        """True for a kernel's result that is stored only in the form that its one reader gives it."""
        i = self.producer.get(v)
        if i is None or v in self.stored or v in self.inside_softmax or v in self._inner:
            return False
        return self.kinds[i] in (Kind.KERNEL, Kind.REDUCTION)

    def _is_epilogue(self, i: int, v: Var, readers: Sequence[int]) -> bool:
        """True for a kernel's wide result that its one reader converts to something narrower, and for a
        product that is returned transposed, unless it is summed of parts; a CPU takes another kernel.
        """
        sealed = self.kinds[i] in (Kind.OPAQUE, Kind.FOREIGN) or self._backend.fuses_greedily
        if len(readers) != 1 or len(self.jaxpr.eqns[i].outvars) != 1 or sealed:
            return False
        reader = self.jaxpr.eqns[readers[0]]
        eqn = self.jaxpr.eqns[i]
        if reader.primitive.name == "transpose" and self._as_xla and eqn.primitive.name in MATRIX:
            return reader.outvars[0] in self.results and not split_bytes(eqn, self._device)
        if reader.primitive.name != "convert_element_type":
            return False
        return compat.aval_nbytes(reader.outvars[0].aval) < compat.aval_nbytes(v.aval)
