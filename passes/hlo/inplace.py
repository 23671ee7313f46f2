"""Which operand an instruction overwrites: the pairs that must share storage, and the pairs that may.

Must: dynamic-update-slice and scatter write into operand 0, so do fusions rooted in them; declared
`output_operand_aliasing`. May: XLA puts an output where a dying operand was if an elementwise path proves it
harmless. Both follow XLA's AliasInfo and CanShareOperandBufferWithUser (public sources).
"""

from __future__ import annotations

from passes.backend import Backend
from passes.hlo.graph import Computation, Instruction, Module
from passes.reach import reached

Pair = tuple[int, tuple[int, ...], tuple[int, ...]]

_IN_PLACE = frozenset({"dynamic-update-slice", "scatter", "all-reduce-start"})
_NO_OP = frozenset({"bitcast", "reshape"})
_ELEMENTWISE = frozenset(
    {
        "constant", "abs", "acos", "acosh", "asin", "asinh", "atanh", "round-nearest-afz",
        "round-nearest-even", "ceil", "count-leading-zeros", "convert", "bitcast-convert", "copy", "cosine",
        "cosh", "sinh", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log",
        "log-plus-one", "not", "negate", "popcnt", "real", "reduce-precision", "rsqrt", "logistic", "sign",
        "sine", "sqrt", "cbrt", "tan", "tanh", "add", "atan2", "compare", "complex", "divide", "maximum",
        "minimum", "multiply", "power", "remainder", "subtract", "and", "or", "xor", "shift-left",
        "shift-right-arithmetic", "shift-right-logical", "stochastic-convert", "select", "clamp",
    }
)  # fmt: skip
_BEHIND_A_REDUCTION = (_ELEMENTWISE - {"copy"}) | _NO_OP


def in_place_pairs(module: Module, instruction: Instruction) -> list[Pair]:
    """(operand number, index in the operand, index in the output) of every pair that must share storage."""
    opcode = instruction.opcode
    if opcode in _IN_PLACE:
        count = 1
        if opcode == "scatter":
            count = len(instruction.shape.parts or (None,))
        elif opcode == "all-reduce-start":
            count = len(instruction.operands)
        return [(0, (), ())] if count == 1 else [(n, (), (n,)) for n in range(count)]
    pairs: list[Pair] = []
    if opcode == "fusion":
        pairs = _fusion_pairs(module, instruction)
    elif opcode == "set-dimension-size":
        return [(0, (), ())]
    elif opcode == "ragged-all-to-all":
        return [(1, (), ())]
    for alias in instruction.proto.output_operand_aliasing:
        pairs.append((alias.operand_index, tuple(alias.operand_shape_index), tuple(alias.output_shape_index)))
    return pairs


def _follow(
    computation: Computation, at: Instruction, index: tuple[int, ...]
) -> tuple[Instruction, tuple[int, ...]]:
    """Back through tuples, get-tuple-elements and views that keep every element where it is."""
    while True:
        if at.opcode == "tuple" and index:
            at, index = computation.by_id[at.operands[index[0]]], index[1:]
        elif at.opcode == "get-tuple-element":
            at, index = computation.by_id[at.operands[0]], (at.number, *index)
        elif at.opcode in _NO_OP and not index:
            at = computation.by_id[at.operands[0]]
        else:
            return at, index


def _fusion_pairs(module: Module, fusion: Instruction) -> list[Pair]:
    fused = module.computations[fusion.called[0]]
    pairs: list[Pair] = []
    for index, shape in fusion.shape.leaves():
        if shape.is_tuple:
            continue
        at, rest = _follow(fused, fused.by_id[fused.root], index)
        for operand, source, target in in_place_pairs(module, at):
            if target != rest:
                continue
            end, found_index = _follow(fused, fused.by_id[at.operands[operand]], source)
            if end.opcode == "fusion":
                for nested_operand, nested_source, nested_target in in_place_pairs(module, end):
                    if nested_target == found_index:
                        end, found_index = _follow(
                            fused, fused.by_id[end.operands[nested_operand]], nested_source
                        )
                        break
            if end.opcode == "parameter":
                pairs.append((end.number, found_index, index))
    return pairs


def is_elementwise(instruction: Instruction, operand: int | None = None) -> bool:
    """True if element i of the output depends on element i of the operand only."""
    if instruction.opcode == "dynamic-update-slice":
        return operand == 0
    return instruction.opcode in _ELEMENTWISE


def _reduction_hero(fused: Computation) -> Instruction | None:
    """The reduction that XLA's reduction emitter runs first: that of the first result that is one, or is made
    of one by operations of one operand, such as a conversion."""
    for made in fused.results():
        while len(made.operands) == 1 and made.opcode in _BEHIND_A_REDUCTION:
            made = fused.by_id[made.operands[0]]
        if made.opcode == "reduce":
            return made
    return None


def _is_transposed(fused: Computation, root: Instruction) -> bool:
    """True if a result is made of a transpose: XLA's transpose emitter writes it in another order."""
    return any(i.opcode == "transpose" for i in reached([root], fused.operands))


def _reduced_roots(fused: Computation) -> frozenset[int]:
    """The results of a fusion that are reductions, beside others."""
    return frozenset(r.id for r in fused.results() if r.opcode == "reduce" and r.id != fused.root)


class Sharing:
    """Answers whether an output may take the place of a dying operand (OFFSETS rule 7); memoized."""

    def __init__(self, module: Module, backend: Backend) -> None:
        self._module = module
        self._backend = backend
        self._by_emitters = backend.sharing == "emitters"
        self._reduces = backend.sharing == "elementwise or reduced"
        self._users: dict[int, dict[int, list[Instruction]]] = {}

    def users(self, computation: Computation) -> dict[int, list[Instruction]]:
        """Users of every instruction of a fused computation."""
        users = self._users.get(computation.id)
        if users is None:
            users = self._users[computation.id] = computation.users()
        return users

    def may_share(
        self, computation: Computation, operand: Instruction, source: tuple[int, ...],
        user: Instruction, target: tuple[int, ...],
    ) -> bool:  # fmt: skip
        """True if XLA lets sub-shape `target` of `user` reuse the storage of `operand` at `source`."""
        if operand.opcode == "constant" or operand.id not in user.operands:
            return False
        before, after = operand.shape.at(source), user.shape.at(target)
        number = user.operands.index(operand.id)
        same = before == after
        if same:
            for n, index, out in in_place_pairs(self._module, user):
                if out == target and index == source and user.operands[n] == operand.id:
                    return True
        if user.opcode == "custom-call" and not self._backend.calls_share:
            return False
        if user.opcode == "fusion":
            if self._by_emitters:
                return self._gpu_fusion(operand, user, target, number, same)
            alike = same or (self._reduces and before.is_same_memory(after))
            return alike and self._cpu_fusion(user, number)
        if not same:
            return False
        return self._plain(computation, operand, user, target, number)

    def _plain(
        self, computation: Computation, operand: Instruction, user: Instruction, target: tuple[int, ...],
        number: int,
    ) -> bool:  # fmt: skip
        if user.opcode in ("while", "conditional"):
            return True
        if user.opcode in ("dynamic-update-slice", "scatter", "set-dimension-size"):
            return user.operands.count(operand.id) == 1 and number == 0
        if user.opcode == "triangular-solve":
            return user.operands.count(operand.id) == 1 and number == 1
        if user.opcode == "sort":
            if len(self.users(computation)[operand.id]) != 1:
                return False
            if len(user.operands) == 1:
                return True
            return user.operands.count(operand.id) == 1 and target == (number,)
        if user.opcode == "call":
            return False
        if user.opcode == "all-reduce" and self._by_emitters:  # of several operands each is one result
            return len(user.operands) == 1 or target == (number,)
        return is_elementwise(user, number)

    def _cpu_fusion(self, fusion: Instruction, number: int) -> bool:
        """True if all that an operand reaches is elementwise or, on a TPU, a reduced result or a view of the
        same bytes. There a dot's kernel may have several results, too."""
        fused = self._module.computations[fusion.called[0]]
        several = self._reduces or fusion.proto.fusion_kind in ("kLoop", "kInput")
        free = {"tuple"} if several else set[str]()
        free |= {"bitcast"} if self._reduces else set()
        reduced = _reduced_roots(fused) if self._reduces else frozenset()
        users = self.users(fused)
        parameter = fused.parameters()[number]
        seen, work = {parameter.id}, [parameter]
        while work:
            current = work.pop()
            for user in users[current.id]:
                if user.id in reduced:
                    continue
                for n, o in enumerate(user.operands):
                    moved = not (is_elementwise(user, n) or user.opcode in free)
                    if o == current.id and moved:
                        return False
                if user.id not in seen:
                    seen.add(user.id)
                    work.append(user)
        return True

    def _gpu_fusion(
        self, operand: Instruction, fusion: Instruction, target: tuple[int, ...], number: int, same: bool
    ) -> bool:
        before, after = operand.shape, fusion.shape.at(target)
        if not same:
            if before.is_tuple or after.is_tuple or before.count != after.count:
                return False
            if before.element_bits != after.element_bits:
                return False
        fused = self._module.computations[fusion.called[0]]
        output = fused.result(target)
        core = fused.by_id[output.operands[0]] if output.opcode == "bitcast" else output
        hero = _reduction_hero(fused) if fusion.proto.fusion_kind == "kInput" else None
        seen = self._walk(fused, fused.parameters()[number], core, target, hero)
        if seen is None:
            return False
        root = fused.by_id[fused.root]
        is_turned = hero is None and fusion.proto.fusion_kind == "kInput"
        if root.opcode == "tuple" and not self._other_roots(fused, root, output, core, seen, is_turned):
            return False
        return output.id in seen

    def _other_roots(
        self, fused: Computation, root: Instruction, output: Instruction, core: Instruction, seen: set[int],
        is_turned: bool,
    ) -> bool:  # fmt: skip
        """True if no other result that the parameter reaches is in the way.

        Args:
            is_turned: whether the transpose emitter writes it, if it has a transposed result. The reduction
                emitter, which comes first, leaves elements where they are.
        """
        written = [fused.by_id[o] for o in root.operands if o in seen]
        if all(r is output for r in written):
            return True
        if not is_elementwise(core) or any(r.opcode in ("transpose", "copy") for r in written):
            return False
        return not is_turned or not any(_is_transposed(fused, r) for r in written)

    def _walk(
        self, fused: Computation, parameter: Instruction, core: Instruction, target: tuple[int, ...],
        hero: Instruction | None,
    ) -> set[int] | None:  # fmt: skip
        """What the parameter reaches, or None if something on the way changes the order of elements.

        The reduction emitter runs its first reduction before it writes other outputs, so that one is safe.
        """
        users = self.users(fused)
        seen, work = {parameter.id}, [parameter]
        while work:
            current = work.pop(0)
            if current is hero:
                continue
            for user in users[current.id]:
                if user.id not in seen:
                    seen.add(user.id)
                    work.append(user)
                if user is not hero and not self._harmless(fused, current, user, core, target):
                    return None
        return seen

    def _harmless(
        self, fused: Computation, current: Instruction, user: Instruction, core: Instruction,
        target: tuple[int, ...],
    ) -> bool:  # fmt: skip
        number = user.operands.index(current.id)
        once = user.operands.count(current.id) == 1
        written = len(user.shape.parts or (None,))
        if user is core and user.opcode == "scatter" and once and number < written:
            return True
        if user is core and user.opcode == "sort" and once:
            return target == (number,)
        if core.opcode == "dynamic-update-slice" and user.opcode == "dynamic-slice":
            update = fused.by_id[core.operands[1]]
            if user.operands[0] == core.operands[0] and user.shape == update.shape:
                return user.shape.count == 1 or user.operands[1:] == core.operands[2:]
        if user.opcode in ("bitcast", "tuple"):
            return True
        if is_elementwise(user, number) and user.opcode != "copy":
            return True
        return user is core and user.opcode == "dynamic-update-slice" and number == 1
