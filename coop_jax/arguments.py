"""Arguments and results that are not all arrays, and arguments that a function changes.

`jax.jit` takes arrays and Python numbers. The other leaves of a tree (functions in an Equinox module,
strings, `self` of a decorated method) are held by a `Mixed`: its leaves are the arrays, and the rest is its
structure, by which `jit` finds a program again. A user's node is only ever built with leaves of its own kind.

What a function changes in its arguments would be lost, since it is given copies. `unchanged` refuses that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from coop_jax.errors import ArgumentError
from coop_jax.statics import Named, Static, attributes, has_attributes, parameters_of
from passes.jaxpr import compat

compat.hide_frames(__file__)


class Mixed:
    """A tree of arrays and other values.

    Attributes:
        arrays: the leaves that are arrays, Python numbers among them.
        others: for each leaf of the tree its value if it is no array, else None.
        tree: the structure of all of them.
    """

    __slots__ = ("arrays", "others", "tree")

    def __init__(self, arrays: Sequence[Any], others: tuple[Static | None, ...], tree: Any) -> None:
        self.arrays, self.others, self.tree = arrays, others, tree

    @property
    def changes(self) -> bool:
        """True if it holds an object whose attributes may change."""
        return any(other is not None and other.changes for other in self.others)

    def open(self) -> Any:
        """The tree."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if other is None else other.value for other in self.others]
        return jax.tree.unflatten(self.tree, leaves)


jax.tree_util.register_pytree_node(
    Mixed, lambda mixed: (mixed.arrays, (mixed.others, mixed.tree)), lambda aux, arrays: Mixed(arrays, *aux)
)


def hold(tree: Any, *, names: Callable[[Any], str] | None = None) -> Any:
    """`tree` itself if its leaves are arrays, else as a `Mixed`.

    Args:
        tree: any; a Python number is an array as for `jit`, except in an Equinox module, where it is not.
        names: gives the name of a leaf from its path, for errors. None if `tree` is a result, whose other
            values are handed on whatever they are.

    Raises:
        ArgumentError: a leaf that is neither an array nor hashable; it names the leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    in_modules = _in_modules(tree, len(leaves))
    fixed = [not _is_array(leaf, inside) for leaf, inside in zip(leaves, in_modules, strict=True)]
    if not any(fixed):
        return tree
    others: list[Static | None] = [None] * len(leaves)
    for i in (i for i, held in enumerate(fixed) if held):
        value = leaves[i].value if isinstance(leaves[i], Named) else leaves[i]
        try:
            others[i] = Static.of(value)
        except TypeError:
            if names is not None:
                raise _unhashable(names(jax.tree_util.tree_leaves_with_path(tree)[i][0]), value) from None
            others[i] = Static.itself(value)
    arrays = [leaf for leaf, held in zip(leaves, fixed, strict=True) if not held]
    return Mixed(arrays, tuple(others), structure)


def release(tree: Any) -> Any:
    """What was held."""
    return tree.open() if isinstance(tree, Mixed) else tree


def _is_array(leaf: Any, in_module: bool) -> bool:
    """True for what `jit` takes, which for what is wrong with an array is left to `jit` to say."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, bool | int | float | complex):
        return not in_module
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    except Exception:  # such as a number that is too large, or a view of a reference, which `jit` takes apart
        return True
    return True


def _in_modules(tree: Any, n_leaves: int) -> list[bool]:
    """For each leaf, if it belongs to an Equinox module, whose numbers decide what the Python code does."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:
        return [False] * n_leaves
    outer = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module))
    counts = [(isinstance(x, module), len(jax.tree.leaves(x))) for x in outer]
    return [inside for inside, count in counts for _ in range(count)]


def _unhashable(name: str, value: Any) -> ArgumentError:
    dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    return ArgumentError(
        f"{name} is a {type(value).__name__}{dtype}: no array, so it is a part of the program, for which it "
        "has to be hashable. Pass it as a tuple, a string or a frozen dataclass, make a pytree of its class, "
        "or let the function close over it."
    )


def unchanged(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Call `function`, and see that its arguments are afterwards what they were.

    Args:
        function, args, kwargs: the call; the arguments hold tracers in the place of arrays.
        is_leaf: nodes that may change, for which somebody else cares.

    Raises:
        ArgumentError: another leaf or structure than before; it names the argument.
    """
    given = (args, kwargs)
    structure: Any
    before, structure = jax.tree.flatten(given, is_leaf)
    # A class may make its leaves whenever it is asked; those are never the same.
    stable = [a is b for a, b in zip(before, jax.tree.leaves(given, is_leaf), strict=True)]
    tracers = [None if is_leaf and is_leaf(x) else _tracers(x) for x in before]
    out = function(*args, **kwargs)
    after, structure_after = jax.tree.flatten(given, is_leaf)
    if structure_after != structure:
        raise _changed(_where_structures_differ(function, given, structure, is_leaf))
    for i, (leaf, known) in enumerate(zip(before, tracers, strict=True)):
        attribute = None
        if known is not None:
            attribute = next((k for k, v in _tracers(leaf).items() if v - known.get(k, set())), None)
        if attribute or (stable[i] and after[i] is not leaf):
            path = jax.tree_util.tree_leaves_with_path(given, is_leaf)[i][0]
            names = [jax.tree_util.GetAttrKey(attribute)] if attribute else []
            raise _changed(argument_name(function, (*path, *names)))
    return out


def _tracers(value: Any) -> dict[str, set[int]]:
    """Which tracers the attributes of a plain object hold, by name."""
    held = attributes(value).items() if has_attributes(value) else ()
    return {name: {id(x) for x in _leaves(x) if isinstance(x, jax.core.Tracer)} for name, x in held}


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value)
    except (TypeError, ValueError, RecursionError, SystemError):
        return []  # such as a dict whose keys have no order, or a list that holds itself


def _changed(name: str) -> ArgumentError:
    return ArgumentError(
        f"the function changes {name} in place, which would be lost: a program's results are what the "
        "function returns. Return the new value and assign it outside; to change a dict or a list within the "
        "function only, copy it there first."
    )


def _where_structures_differ(function: Any, given: Any, structure: Any, is_leaf: Any) -> str:
    """The first argument whose structure is another than in `structure`."""
    were = structure.children()
    for kind, (old, new) in enumerate(zip(were, given, strict=True)):
        keys = range(len(new)) if kind == 0 else sorted(new)
        for key, child in zip(keys, old.children(), strict=True):
            if jax.tree.structure(new[key], is_leaf=is_leaf) != child:
                entry = jax.tree_util.SequenceKey(key) if kind == 0 else jax.tree_util.DictKey(key)
                return argument_name(function, (jax.tree_util.SequenceKey(kind), entry))
    return "an argument"


def argument_name(function: Callable[..., Any], path: Sequence[Any]) -> str:
    """How a user calls a leaf of (args, kwargs) at `path`, such as "`batch['x']`"."""
    kind, entry, *rest = path
    if kind.idx == 1:
        return f"`{entry.key}{jax.tree_util.keystr(tuple(rest))}`"
    return f"`{_positional(function, entry.idx)}{jax.tree_util.keystr(tuple(rest))}`"


def _positional(function: Callable[..., Any], i: int) -> str:
    for n, p in enumerate(parameters_of(function)):
        if p.kind is p.VAR_POSITIONAL:
            return f"{p.name}[{i - n}]"
        if n == i and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            return p.name
    return f"args[{i}]"
