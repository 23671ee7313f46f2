"""What differs between the platforms that XLA compiles for: one value a platform.

Nothing else in the product compares a platform's name with anything: what a stage has to know of a platform
is a field here. Adding a platform is adding a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeapRule = Literal["largest first", "in time order"]
FillRule = Literal["not", "together", "by copies"]
HoistRule = Literal["nothing", "no larger", "all"]
SharingRule = Literal["elementwise", "elementwise or reduced", "emitters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One platform: XLA's rules of memory there, and what can be done with its programs.

    Attributes:
        name: as XLA's callback and JAX's lowering call it.
        aliases: what else JAX calls its devices.
        alignment: of the starts of temporaries, in bytes.
        host_alignment: of those in the host's memory, which are packed largest first.
        host_multiple: of which the size of the host's memory is a multiple.
        heap: how temporaries are packed, see `passes.offsets.xla_heap`: largest first and longest first,
            of which the smaller heap is taken, or each when it comes alive, among what is there then.
        sharing: which fusions may write over an operand: those that are elementwise on the way from it to
            the results, or reduce it to one of several results, or what the emitters of GPU fusions allow.
        calls_share: True if a custom call may write over an operand that dies there.
        reuses_results: True if temporaries live in any result or donated argument while that is free; else
            only in one that what makes them reads.
        table_bytes: of a tuple's table of pointers; None for one pointer an element.
        awaits_at_once: True if a collective that nothing runs beside has no tables of pointers
            (`passes.hlo.synchronous`).
        pages: True if copies to the host's memory can run beside kernels.
        host_pool_bytes: of the host's memory that JAX's client can copy to; None for all of it.
        context_space: the memory space of the word of context that an asynchronous copy has; not the
            temporaries' where it is not 0.
        scalar_space: that of scalars that are computed by themselves, likewise.
        small_space: that of small arrays, in which XLA has put them before it calls back.
        scratch_bytes: what each core of another kind gets to work in, a TPU's sparse cores.
        fast_bytes: what passes that follow may take off, since they move values to a memory of the chip. What
            is predicted is then an upper bound, and XLA's own count decides where only that is over.
        library: the package whose shared library compiles for it.
        default_device: whose cost model an unknown device gets (`passes.cost`).
        runs_as_scheduled: True if the module that a program runs is the one that XLA called back with.
        temps_are_the_rest: True if XLA's own count of temporaries is not what is left of its total.
        limits_memory: True if XLA refuses programs that need more than the device has.
        has_machines_memory: True if a device's memory is the machine's.
        takes_thunks: True if XLA takes a compiled program's thunks into another program.
        pins_as_compiled: True if programs can be pinned by the compile that makes them.
        fuses_greedily: True if XLA's fusion is that of `passes.jaxpr.greedy_fusion`.
        runs_branches_together: True if XLA schedules what does not depend on each other side by side, though
            nothing is gained by that: kernels run as soon as what they read is there.
        hoists: what XLA moves in front of a loop that does not change it (`passes.jaxpr.hoisted`): no kernel,
            those whose results are no larger than what they read, or all.
        rolls_random_bits: True if JAX makes random bits there in a loop (`passes.jaxpr.rolled_bits`).
        joined_row_bytes: rows at least so long are joined to longer ones by a kernel that does nothing else:
            XLA:CPU copies them whole, where a branch per element would cost more (0.11.2: only from 512).
        fuses_normalisation: True if XLA makes one kernel of a softmax, its reductions included.
        drops_rounding: True if XLA takes out what rounds values to the precision that they have.
        reads_together: True if XLA makes one kernel of several that read the same.
        launch_ns: what XLA takes a launch for where it weighs whether readers compute an elementwise value
            themselves (`passes.jaxpr.storage`); None where it goes by other rules.
        looks: how often a program can be planned once more, and compiled as far as XLA's schedule, in the
            time of one compile (in `benchmarks.side_by_side` once took .1 to .35 of a compile's CPU time on a
            CPU, where most of that is code generation, .6 to 1.3 for an H200; XLA's part is .1 on a TPU).
        fuses_results: True if XLA computes what follows a dot or convolution inside of its kernel.
        fuses_products: True if what surrounds a product of matrices is computed in its kernel as
            `passes.jaxpr.product_kernels` says.
        computes_scattered: True if what is scattered is computed in the kernel that does it.
        scatters_maxima: True if XLA makes the gradient of a maximum over windows a scatter into zeros.
        multiplies_mixed: True if XLA multiplies numbers of two types; elsewhere JAX converts them before.
        rounds_products: True if XLA stores what only products of float32 read in bfloat16.
        runs_free_early: True if XLA runs what reads nothing but arguments long before its turn: the products
            of an LSTM's inputs. On a CPU a barrier against that costs more than it holds back.
        merges_dots_bytes: products that share an operand are made one where one of them reads and writes no
            more (`passes.jaxpr.merged_dots`); 0 where that is not done.
        multiplies_vectors: True if XLA multiplies a matrix with a vector element by element, and sums that.
        splits_small_dots: True if XLA splits and merges dots that do not fill the device.
        fills_stacks: how XLA writes zeros to the stacks of a scan's results before it: those of one form by
            one kernel; or one, which is copied to the others; or not at all.
        drops_copies: True if XLA takes copies that nothing needs out after its callback
            (`passes.hlo.copies`).
    """

    name: str
    aliases: tuple[str, ...] = ()
    alignment: int
    host_alignment: int = 256
    host_multiple: int = 1
    heap: HeapRule = "largest first"
    sharing: SharingRule
    calls_share: bool = False
    reuses_results: bool = True
    table_bytes: int | None = None
    awaits_at_once: bool = False
    pages: bool = True
    host_pool_bytes: int | None = None
    context_space: int = 0
    scalar_space: int = 0
    small_space: int = 0
    scratch_bytes: int = 0
    fast_bytes: int = 0
    runs_as_scheduled: bool = True
    temps_are_the_rest: bool = False
    limits_memory: bool = False
    library: str
    default_device: str
    has_machines_memory: bool = False
    takes_thunks: bool = False
    pins_as_compiled: bool = False
    fuses_greedily: bool = False
    runs_branches_together: bool = False
    hoists: HoistRule = "nothing"
    rolls_random_bits: bool = False
    joined_row_bytes: int | None = None
    fuses_normalisation: bool = False
    drops_rounding: bool = False
    reads_together: bool = False
    launch_ns: int | None = None
    fuses_results: bool = False
    fuses_products: bool = False
    computes_scattered: bool = False
    scatters_maxima: bool = False
    multiplies_mixed: bool = False
    rounds_products: bool = False
    runs_free_early: bool = False
    merges_dots_bytes: int = 0
    multiplies_vectors: bool = False
    splits_small_dots: bool = False
    fills_stacks: FillRule = "not"
    drops_copies: bool = False
    looks: int = 1


CPU = Backend(
    name="cpu", alignment=64, sharing="elementwise", calls_share=True, library="jaxlib",
    default_device="cpu", pages=False, has_machines_memory=True, pins_as_compiled=True, fuses_greedily=True,
    runs_branches_together=True, hoists="all", rolls_random_bits=True, joined_row_bytes=64,
    fills_stacks="by copies", looks=2,
)  # fmt: skip
CUDA = Backend(
    name="cuda", aliases=("gpu", "rocm"), alignment=256, sharing="emitters",
    library="jax_plugins.xla_cuda13", default_device="h100", takes_thunks=True,
    multiplies_vectors=True, splits_small_dots=True, fuses_normalisation=True, drops_rounding=True,
    reads_together=True, launch_ns=1000, merges_dots_bytes=136 << 20, fuses_products=True,
    computes_scattered=True, scatters_maxima=True, fills_stacks="together",
    host_pool_bytes=64 << 30, awaits_at_once=True,
)  # fmt: skip
TPU = Backend(
    name="tpu", alignment=16384, host_alignment=4096, host_multiple=4096, heap="in time order",
    sharing="elementwise or reduced", reuses_results=False, table_bytes=512, context_space=2, scalar_space=6,
    small_space=4, scratch_bytes=32 << 10, fast_bytes=128 << 20, runs_as_scheduled=False,
    temps_are_the_rest=True, limits_memory=True, fuses_results=True, multiplies_mixed=True,
    rounds_products=True, runs_free_early=True, drops_copies=True, hoists="no larger", library="libtpu",
    default_device="v5e", looks=3,
)  # fmt: skip
BACKENDS = {b.name: b for b in (CPU, CUDA, TPU)}
_BY_ANY_NAME = {name: b for b in BACKENDS.values() for name in (b.name, *b.aliases)}


def backend_of(platform: str) -> Backend | None:
    """The backend that goes by a platform's name, such as "gpu"; None if there is none."""
    return _BY_ANY_NAME.get(platform.lower())
