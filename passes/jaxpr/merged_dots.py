"""Products of one array that XLA:GPU computes as one: the projections of an attention, the gates of a layer.

    y = x @ a
    z = x @ b                  becomes                  yz = x @ concatenate(a, b)

Both are slices of what is then one value: it lives as long as either, and no reader is computed in the
product's own kernel. Joined is what shares an operand, where neither follows from the other, and one of the
two reads and writes few enough bytes. Source: `DotMerger` of openxla/xla; its limit and what it leaves alone
as `tests/test_merged_dots.py` compares them with XLA's modules for an H200.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from jax import lax

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, is_placed
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import reshape_eqn

# A product of fewer columns is not joined with a wider one.
_NARROW = 64
_SUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A product that may be joined to another.

    Attributes:
        place: of its equation.
        side: of the operand that it shares.
        columns: the dimensions of the other operand that are its own, joined to one.
        first: where they come in the other operand, which has them side by side.
        result_dim: where they come in its result.
        nbytes: that it reads and writes.
        key: equal for two that may be joined.
    """

    place: int
    side: int
    columns: tuple[int, ...]
    first: int
    result_dim: int
    nbytes: int
    key: Hashable

    @property
    def width(self) -> int:
        return prod(self.columns)


def with_merged_dots(jaxpr: Jaxpr, most_bytes: int) -> Jaxpr:
    """An open jaxpr with such products written as one.

    Args:
        most_bytes: that one of two reads and writes.

    Returns:
        The same object if there are none, or where equations have an order to keep.
    """
    if any(has_effect(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    classes: dict[tuple[Var, Hashable], list[_Product]] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        for product in _products(place, eqn):
            shared = compat.variables(eqn.invars)[product.side]
            classes.setdefault((shared, product.key), []).append(product)
    classes = {key: alike for key, alike in classes.items() if len(alike) > 1}
    if not classes:
        return jaxpr
    merger = _Merger(jaxpr, sorted({product.place for alike in classes.values() for product in alike}))
    groups = [group for alike in classes.values() for group in merger.groups(alike, most_bytes)]
    return compat.rebuild(jaxpr, eqns=_written(jaxpr.eqns, groups)) if groups else jaxpr


def _products(place: int, eqn: JaxprEqn) -> Iterator[_Product]:
    """An equation as a product that shares its first operand, and as one that shares its second."""
    if eqn.primitive.name != "dot_general" or len(set(compat.variables(eqn.invars))) < 2:
        return
    (summed, batch), params = eqn.params["dimension_numbers"], dict(eqn.params)
    leading = tuple(range(len(batch[0])))
    is_led = tuple(batch[0]) == tuple(batch[1]) == leading
    if is_placed(eqn) or len(summed[0]) != 1 or not is_led:
        return
    del params["dimension_numbers"], params["out_sharding"]
    # Its sums are in 32 bits until they are rounded.
    result = max(compat.aval_nbytes(eqn.outvars[0].aval), _SUM_BYTES * array_of(eqn.outvars[0]).size)
    nbytes = result + sum(compat.aval_nbytes(v.aval) for v in eqn.invars)
    n_free = [len(array_of(v).shape) - len(leading) - 1 for v in eqn.invars]
    for side in range(2):
        other = array_of(eqn.invars[1 - side])
        dim, n_columns = summed[1 - side][0] - len(leading), n_free[1 - side]
        if not n_columns or dim not in (0, n_columns):
            continue
        first = len(leading) + (0 if dim else 1)
        yield _Product(
            place=place,
            side=side,
            columns=other.shape[first : first + n_columns],
            first=first,
            result_dim=len(leading) + (0 if side else n_free[side]),
            nbytes=nbytes,
            key=(side, summed[side], first, other.dtype, array_of(eqn.outvars[0]).dtype, str(params)),
        )


class _Merger:
    """Which products follow from which, joined ones together."""

    def __init__(self, jaxpr: Jaxpr, places: Sequence[int]) -> None:
        self._bit = {place: 1 << k for k, place in enumerate(places)}
        self._follows: dict[int, int] = {}
        self._joined: set[int] = set()
        of: dict[Var, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            mask = 0
            for v in compat.variables(eqn.invars):
                mask |= of.get(v, 0)
            if i in self._bit:
                self._follows[i] = mask
                mask |= self._bit[i]
            if mask:
                of.update(dict.fromkeys(eqn.outvars, mask))

    def groups(self, alike: Sequence[_Product], most_bytes: int) -> Iterator[list[_Product]]:
        """Those of some products of one operand that are joined."""
        waiting = [product for product in alike if product.place not in self._joined]
        while waiting:
            group, others = waiting[:1], []
            for product in waiting[1:]:
                first = group[0]
                is_small = min(first.nbytes, product.nbytes) <= most_bytes
                are_alike = (first.width < _NARROW) == (product.width < _NARROW)
                if is_small and are_alike and self._join(group, product):
                    group.append(product)
                else:
                    others.append(product)
            if len(group) > 1:
                self._joined.update(product.place for product in group)
                yield group
            waiting = others

    def _join(self, group: Sequence[_Product], product: _Product) -> bool:
        """Join a product to a group, unless one follows from the other."""
        both = before = 0
        for one in (*group, product):
            both |= self._bit[one.place]
            before |= self._follows[one.place]
        if before & both:
            return False
        for place, follows in self._follows.items():
            if follows & both:
                self._follows[place] = follows | both | before
            elif self._bit[place] & both:
                self._follows[place] = follows | before
        return True


def _written(eqns: Sequence[JaxprEqn], groups: Sequence[Sequence[_Product]]) -> list[JaxprEqn]:
    """Equations with each group in the place of its last, and what reads it behind that, in its order."""
    written: list[JaxprEqn] = []
    group_of = {product.place: group for group in groups for product in group}
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    waiting: list[int] = []
    done: set[int] = set()

    def write(i: int) -> bool:
        """Write an equation, or the group that it is the last of, if all that it reads is there."""
        group = group_of.get(i, ())
        places = [product.place for product in group] or [i]
        read = (maker.get(v) for j in places for v in compat.variables(eqns[j].invars))
        if any(m is not None and m not in done for m in read):
            return False
        written.extend(_joined(eqns, group) if group else [eqns[i]])
        done.update(places)
        return True

    for i in range(len(eqns)):
        if i in group_of and i != group_of[i][-1].place:
            continue
        if not write(i):
            waiting.append(i)
        elif i in group_of:
            waiting = [j for j in waiting if not write(j)]
    while waiting:
        left = [j for j in waiting if not write(j)]
        assert len(left) < len(waiting), "no group follows from itself"
        waiting = left
    return written


def _joined(eqns: Sequence[JaxprEqn], group: Sequence[_Product]) -> list[JaxprEqn]:
    """One product, and its slices."""
    one, like = group[0], eqns[group[0].place]
    written: list[JaxprEqn] = []

    def reshaped(v: Var, shape: Sequence[int], result: Var | None = None) -> Var:
        if tuple(shape) == array_of(v).shape:
            return v
        made = result or compat.shaped_var(v, shape)
        written.append(reshape_eqn(v, made, like))
        return made

    others: list[Var] = []
    for product in group:
        v = compat.variables(eqns[product.place].invars)[1 - one.side]
        shape, end = array_of(v).shape, one.first + len(product.columns)
        others.append(reshaped(v, (*shape[: one.first], product.width, *shape[end:])))
    ends = [0, *accumulate(product.width for product in group)]
    columns = compat.shaped_var(others[0], _replaced(array_of(others[0]).shape, one.first, ends[-1]))
    joined = compat.unary_eqn(lax.concatenate_p, others[0], columns, like, dimension=one.first)
    written.append(compat.replaced(joined, invars=others))
    summed, batch = like.params["dimension_numbers"]
    n_batch, shape = len(batch[0]), array_of(like.outvars[0]).shape
    before, after = shape[: one.result_dim], shape[one.result_dim + len(one.columns) :]
    whole = compat.shaped_var(like.outvars[0], (*before, ends[-1], *after))
    own = ((n_batch + 1 if one.first == n_batch else n_batch),)
    sides = [(summed[one.side], like.invars[one.side]), (own, columns)]
    numbers, operands = zip(*(sides if one.side == 0 else reversed(sides)), strict=True)
    params = {**like.params, "dimension_numbers": (numbers, batch)}
    written.append(compat.replaced(like, invars=list(operands), outvars=[whole], params=params))
    for product, (start, stop) in zip(group, pairwise(ends), strict=True):
        result = eqns[product.place].outvars[0]
        is_flat = len(product.columns) == 1
        part = result if is_flat else compat.shaped_var(result, (*before, product.width, *after))
        whole_shape = array_of(whole).shape
        params = {
            "start_indices": _replaced((0,) * len(whole_shape), one.result_dim, start),
            "limit_indices": _replaced(whole_shape, one.result_dim, stop), "strides": None,
        }  # fmt: skip
        written.append(compat.unary_eqn(lax.slice_p, whole, part, like, **params))
        reshaped(part, array_of(result).shape, result)
    return written


def _replaced(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])
