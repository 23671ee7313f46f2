"""Who sums the parts of a product that XLA:GPU splits: the kernels that read it, or one of its own.

    y = x @ w, in two parts    z = tanh(y) and v = y * 2      two kernels read both parts, y is not stored

What passes a barrier, what the program returns and what a kernel reads that fuses nothing is summed before.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.cost import DeviceModel
from passes.jaxpr.compat import Var
from passes.jaxpr.primitives import FUSING
from passes.jaxpr.split_dots import split_bytes, sum_ns
from passes.jaxpr.storage import Storage


def read_in_parts(storage: Storage, roots: Sequence[int], device: DeviceModel) -> dict[Var, int]:
    """The results of split products that their readers sum, and how many kernels these are.

    Args:
        roots: the equations that kernels are of.
    """
    if device.split is None:
        return {}
    eqns = storage.jaxpr.eqns
    split = {eqns[i].outvars[0]: eqns[i] for i in roots if split_bytes(eqns[i], device)}
    readers: dict[Var, list[int]] = {v: [] for v in split}
    for root in roots if split else ():
        for v in storage.kernel_reads(root):
            if v in readers:
                readers[v].append(root)
    held = {leaf for v in storage.original.values() for leaf in storage.reads[v]} | storage.results

    def is_cheaper(v: Var) -> bool:
        return sum_ns(split[v], device, len(readers[v])) <= sum_ns(split[v], device)

    return {
        v: len(by)
        for v, by in readers.items()
        if by and v not in held and all(storage.kinds[i] in FUSING for i in by) and is_cheaper(v)
    }
