"""The 0-1 program of the exact mode: what is recomputed, and what is kept, in every block.

After Checkmate (MLSys 2020) and Moccasin (ICML 2023): the retention intervals of a value are its runs of
`kept` blocks, each begun by its first run or by a recompute; there may be any number of them. One function
per family of constraints. All but `add_ordered_memory` hold for every plan, so that without ordered slots
the optimum is a lower bound for all plans. Sizes are rounded down to units: a relaxation, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from passes.liveness import Graph
from passes.planners.exact.frame import Frame

Literal = cp_model.IntVar
Need = cp_model.IntVar | int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retention:
    """The variables of one model.

    Attributes:
        frame: blocks of the time axis.
        model: the solver's model.
        capacity: the budget less the arguments, in units.
        unit: bytes to a unit.
        recompute: (block, op): the op is recomputed in the block.
        kept: (block, buffer): a live range is there when the block begins.
    """

    frame: Frame
    model: cp_model.CpModel
    capacity: int
    unit: int
    recompute: dict[tuple[int, int], Literal] = field(default_factory=dict)
    kept: dict[tuple[int, int], Literal] = field(default_factory=dict)

    def size(self, nbytes: int) -> int:
        """Whole units in so many bytes."""
        return nbytes // self.unit

    def sources(self, block: int, buffer: int) -> list[Literal]:
        """What can bring a buffer that is not free into a block."""
        literals = (
            self.kept.get((block, buffer)),
            self.recompute.get((block, self.frame.graph.producer[buffer])),
        )
        return [literal for literal in literals if literal is not None]


def build(frame: Frame, budget_bytes: int, unit: int) -> Retention:
    """All families over one frame, minimizing the cost of the recomputes."""
    capacity = (budget_bytes - frame.graph.argument_bytes) // unit
    made = Retention(frame=frame, model=cp_model.CpModel(), capacity=capacity, unit=unit)
    add_variables(made)
    add_carrying(made)
    add_inputs(made)
    add_outputs(made)
    add_slot_memory(made)
    add_recompute_memory(made)
    add_ordered_memory(made)
    cost_ns = frame.graph.cost_ns
    made.model.minimize(sum(cost_ns[op] * literal for (_, op), literal in made.recompute.items()))
    return made


def add_variables(made: Retention) -> None:
    """One literal for every recompute and every live range that may be of use."""
    frame = made.frame
    for block in range(1, frame.n_blocks):
        for op in range(frame.slots(block)[0]):
            if frame.may_recompute(block, op):
                made.recompute[block, op] = made.model.new_bool_var(f"recompute {op} in {block}")
        for buffer in range(len(frame.graph.nbytes)):
            if frame.may_keep(block, buffer):
                made.kept[block, buffer] = made.model.new_bool_var(f"keep {buffer} into {block}")


def add_carrying(made: Retention) -> None:
    """What is there when a block begins was there before, or was made in the block before."""
    for (block, buffer), literal in made.kept.items():
        if not made.frame.is_free(block - 1, buffer):
            made.model.add_bool_or([*made.sources(block - 1, buffer), ~literal])


def add_inputs(made: Retention) -> None:
    """First runs and recomputes find their inputs in their block."""
    graph, frame = made.frame.graph, made.frame
    for op, inputs in enumerate(graph.inputs):
        block = frame.block(op)
        for buffer in inputs:
            if not frame.is_free(block, buffer):
                made.model.add_bool_or(made.sources(block, buffer))
    for (block, op), literal in made.recompute.items():
        for buffer in graph.inputs[op]:
            if not frame.is_free(block, buffer):
                made.model.add_bool_or([*made.sources(block, buffer), ~literal])


def add_outputs(made: Retention) -> None:
    """The program's outputs are there at the end."""
    block = made.frame.n_blocks - 1
    for buffer, is_output in enumerate(made.frame.graph.is_output):
        if is_output and not made.frame.is_free(block, buffer):
            made.model.add_bool_or(made.sources(block, buffer))


def add_slot_memory(made: Retention) -> None:
    """When a breakpoint's op runs, its own buffers and what the next block finds are within the budget."""
    graph = made.frame.graph
    for block, op in enumerate(made.frame.breakpoints):
        own = {*graph.inputs[op], *graph.outputs[op]}
        saved = most_saved(made, op)
        terms = [made.size(graph.nbytes[b]) for b in sorted(own)]
        held: list[cp_model.LinearExprT] = [
            made.size(graph.nbytes[b]) * literal
            for b in range(len(graph.nbytes))
            if b not in own and (literal := made.kept.get((block + 1, b))) is not None
        ]
        for b, units in saved.items():
            literal = made.kept.get((block + 1, b))
            held.append(-units if literal is None else units * literal - units)
        work = made.size(graph.workspace_bytes[op])
        made.model.add(sum(held) <= made.capacity - sum(terms) - work)


def add_recompute_memory(made: Retention) -> None:
    """While an op is recomputed, its own buffers and all that passes through the block are in the budget."""
    through = _passing(made)
    for (block, op), literal in made.recompute.items():
        own = {*made.frame.graph.inputs[op], *made.frame.graph.outputs[op]}
        held = [
            made.size(made.frame.graph.nbytes[b]) * passing
            for b, passing in through[block].items()
            if b not in own
        ]
        least = _local_units(made, op)
        made.model.add(sum(held) + least * literal <= made.capacity)


def add_ordered_memory(made: Retention) -> None:
    """In ordered slots every op is recomputed at most once, in schedule order, each within the budget."""
    for slot in made.frame.ordered:
        block = made.frame.block(slot)
        assert len(made.frame.slots(block)) == 1, f"slot {slot} shares block {block}"
        _add_one_range(made, block)
        needed = _needed_from(made, slot, block)
        ops = [op for (at, op) in made.recompute if at == block]
        for op in [*ops, slot]:
            if op < len(made.frame.graph.cost_ns):
                _add_event(made, block, op, slot, needed)


def most_saved(made: Retention, op: int) -> dict[int, int]:
    """For every input the most units that some output may save by taking its place."""
    nbytes = made.frame.graph.nbytes
    saved: dict[int, int] = {}
    for out, inp in made.frame.graph.shares[op]:
        units = -(-min(nbytes[out], nbytes[inp]) // made.unit)
        saved[inp] = max(saved.get(inp, 0), units)
    return saved


def sure_pairs(graph: Graph, op: int) -> list[tuple[int, int]]:
    """Pairs (output, input) of which the output takes the place for certain if the input dies at `op`."""
    pairs: list[tuple[int, int]] = []
    outs: list[int] = []
    inps: list[int] = []
    for out, inp in graph.shares[op]:
        if out not in outs and inp not in inps:
            pairs.append((out, inp))
        outs.append(out)
        inps.append(inp)
    return pairs


def surely_saved(made: Retention, op: int) -> dict[int, int]:
    """For every input the units that are saved for certain if it dies at `op`, others dying or not."""
    graph = made.frame.graph
    pairs = sure_pairs(graph, op)
    return {inp: made.size(min(graph.nbytes[out], graph.nbytes[inp])) for out, inp in pairs}


def _local_units(made: Retention, op: int) -> int:
    graph = made.frame.graph
    own = sorted({*graph.inputs[op], *graph.outputs[op]})
    total = sum(made.size(graph.nbytes[b]) for b in own) + made.size(graph.workspace_bytes[op])
    return max(0, total - sum(most_saved(made, op).values()))


def _passing(made: Retention) -> list[dict[int, Literal]]:
    """By block: literals that are true where a live range lives through the whole block."""
    passing: list[dict[int, Literal]] = [{} for _ in range(made.frame.n_blocks)]
    for block, buffer in made.kept:
        after = made.kept.get((block + 1, buffer))
        if after is None:
            continue
        recompute = made.recompute.get((block, made.frame.graph.producer[buffer]))
        if recompute is None:
            passing[block][buffer] = after
        else:
            literal = made.model.new_bool_var(f"{buffer} through {block}")
            made.model.add_bool_or([literal, ~after, recompute])
            passing[block][buffer] = literal
    return passing


def _add_one_range(made: Retention, block: int) -> None:
    """A buffer that is recomputed in an ordered slot is not kept into it."""
    for (at, op), literal in made.recompute.items():
        if at == block:
            for b in made.frame.graph.outputs[op]:
                if (block, b) in made.kept:
                    made.model.add_implication(literal, ~made.kept[block, b])


def _needed_from(made: Retention, slot: int, block: int) -> list[list[tuple[int, Need]]]:
    """For every buffer (op, need): whether it is needed in the slot at `op` or later, ops ascending.

    The last entry, at op `slot + 1`, is what the next block finds.
    """
    graph = made.frame.graph
    readers: list[list[int]] = [[] for _ in graph.nbytes]
    for op in [*(op for (at, op) in made.recompute if at == block), *range(slot, len(graph.cost_ns))[:1]]:
        for b in graph.inputs[op]:
            readers[b].append(op)
    last = block == made.frame.n_blocks - 1
    needed: list[list[tuple[int, Need]]] = []
    for b, ops in enumerate(readers):
        need: Need = 1 if last and graph.is_output[b] else made.kept.get((block + 1, b), 0)
        chain = [(slot + 1, need)]
        for op in reversed(ops):
            need = _need_at(made, block, op, slot, need)
            chain.append((op, need))
        needed.append(chain[::-1])
    return needed


def _need_at(made: Retention, block: int, op: int, slot: int, later: Need) -> Need:
    """Whether the op reads its inputs in the slot, or a later one does."""
    if op == slot or (isinstance(later, int) and later):
        return 1
    literal = made.model.new_bool_var(f"needed at {op} in {block}")
    made.model.add_implication(made.recompute[block, op], literal)
    if not isinstance(later, int):
        made.model.add_implication(later, literal)
    return literal


def _need(chain: list[tuple[int, Need]], op: int) -> Need:
    """Whether a buffer is needed at `op` or later."""
    return next((need for reader, need in chain if reader >= op), 0)


def _add_event(made: Retention, block: int, op: int, slot: int, needed: list[list[tuple[int, Need]]]) -> None:
    """Live units while `op` runs in an ordered slot."""
    graph = made.frame.graph
    running: Need = made.recompute[block, op] if op < slot else 1
    own_units = sum(made.size(graph.nbytes[b]) for b in graph.outputs[op])
    terms = [(own_units + made.size(graph.workspace_bytes[op])) * running]
    for b, producer in enumerate(graph.producer):
        units = made.size(graph.nbytes[b])
        if producer > op and (block, b) in made.kept:
            terms.append(units * made.kept[block, b])
        elif 0 <= producer < op and units:
            terms.append(units * _need(needed[b], op))
    for b, units in surely_saved(made, op).items():
        terms.append(-units * _saves(made, running, _need(needed[b], op + 1)))
    made.model.add(sum(terms) <= made.capacity)


def _saves(made: Retention, running: Need, after: Need) -> Literal:
    """True only if the op runs and its input is not needed afterwards."""
    literal = made.model.new_bool_var("in place")
    made.model.add(literal <= running)
    made.model.add(literal + after <= 1)
    return literal
