"""The decorator: a function and a budget."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import jax

from coop_jax import autodiff, nnx, relowering
from coop_jax.arguments import Mixed, argument_name, hold, release, unchanged
from coop_jax.budget import Budget
from coop_jax.config import RematConfig
from coop_jax.errors import ConstraintError, UnsupportedError
from coop_jax.pinning import PinnedCalls
from coop_jax.statics import StaticArguments, has_attributes
from passes.cost import DEVICES
from passes.hlo.enforce import OnFragmentation
from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.values import Constraints, names_in
from passes.objective import Objective
from passes.planners.config import PLANNERS

compat.hide_frames(__file__)

FRAGMENTATION = ("recompute", "pin", "error")


@overload
def remat[**P, R](fn: Callable[P, R], *, budget: Any = ..., **options: Any) -> Callable[P, R]: ...
@overload
def remat[**P, R](
    fn: None = None, *, budget: Any = ..., **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def remat(  # type: ignore[misc]  # the options stand here once
    fn: Callable[..., Any] | None = None,
    *,
    budget: Any = None,
    host: int | str | None = None,
    planner: str = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    policy: Callable[..., bool] | None = None,
    save: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    offload: str | Sequence[str] = (),
    device: str | None = None,
    pin: bool = False,
    on_fragmentation: OnFragmentation = "recompute",
    tune: int = 0,
    objective: str = "time",
    max_overhead: float | None = None,
) -> Callable[..., Any]:
    """Hold the compiled program that contains `fn` to a memory budget, by recomputing values.

    Decorate a whole step, with its gradient taken inside, or a function whose gradient is taken; then
    forward and backward are planned together. Values and gradients are those of `fn`. Works under every
    transformation; called outside `jax.jit` it compiles itself. A function with side effects (such as
    `jax.debug.print`) runs them once per call.

    Arguments and results are any pytrees. Leaves that are no arrays, such as functions in an Equinox module,
    belong to the program. What `fn` changes in Flax NNX objects is carried out, as `nnx.remat` does.

    Args:
        fn: the function. Left out, a decorator is returned: `@coop.remat(budget="8GiB")`.
        budget: the peak device memory, per device, of the whole compiled program: bytes, "8GiB", "8 GB",
            "85%" of the device's memory, a float in (0, 1] (that fraction of the program's peak without
            rematerialization), a `coop.Budget`, or None: the device's memory less headroom.
        host: how much may wait in the host's memory, as bytes or "64GiB": values are sent there and brought
            back where that is cheaper than computing them again, or where nothing else keeps the budget. It
            is kept as the budget is, and at most what JAX can use of that memory. None for no paging; on a
            CPU there is none. The same as `coop.Budget(host=...)`.
        planner: "auto" (what to use), or one of `passes.planners.config.PLANNERS`: "exact" proves what it
            can about small programs, "dtr" and others are there to compare with.
        static_argnums, static_argnames: arguments that are Python values, as in `jax.jit`.
        save: names (see `jax.ad_checkpoint.checkpoint_name`) of values that are never computed a second
            time: each is kept from where it is made to its last use, inside `lax.scan` in a stack. The plan
            never runs its equation again, and the enforcing stage runs no kernel again that holds an
            instruction of it, by the labels that XLA carries along. One thing is not ruled out: XLA itself
            may compute a cheap elementwise value inside several kernels where the plan changes nothing.
        recompute: names of values that are not kept across to the backward pass, nor is what is computed
            elementwise from them: it is computed once more there. That holds for a value in whatever form
            it is read (reshaped, unnamed), but not for results of the function, which exist anyway.
        policy: as `jax.checkpoint` takes it and called the same way, about equations outside of control
            flow and in bodies of scans. Of the values that the backward pass needs, those it saves are as
            in `save`, those it offloads as in `offload`, all others as in `recompute`; a scan's carry is
            stacked, and results of other control flow and of operations that cannot be recomputed are kept.
        offload: names of values that are kept as with `save`, but wait in the host's memory from their last
            use in the forward pass on, whatever it costs. Without `host` all of that memory may be used that
            JAX can use: then other values may wait there, too. On a CPU they are kept.
        device: name of the cost model to plan with, such as "h200"; None takes the device's own.
        pin: pack the temporaries of the program anew after its compile (see `coop.pin`), where the function
            is called outside `jax.jit` on a CPU. A program under a `jax.jit` of your own cannot be pinned
            from within: give it to `coop.pin`, lowered or compiled.
        on_fragmentation: what to do where only XLA's packing of the temporaries breaks the budget:
            "recompute" more, "pin" (count on pinning; where nobody pins the program, recompute), or "error".
        tune: how many of the cheapest plans by estimate are compiled to the end and run, on the device that
            is here and made-up arguments, to take the fastest; the report says what was measured. It takes
            as many compiles. A clock decides then, so another process may take another plan. 0 for none.
        objective: what is least within the budgets: "time", or "energy", by estimate, on devices whose makers
            publish their power (GPUs).
        max_overhead: with objective "energy" by which share the program may be slower than without
            recomputes, by estimate: 0.1 for a tenth; None for any. Where no plan keeps that, the quickest is
            taken, and the report says so.

    Returns:
        A function of the same signature. What its compile is at, after two seconds, is told to the logger
        `coop_jax` at INFO.

    Raises:
        ArgumentError: when it is called: an argument that is neither an array nor hashable, or that `fn`
            changes in place though it is no object of NNX.
        BudgetError: the budget is none of the accepted forms.
        UnsupportedError: an option that does not exist yet, an unknown planner or device; when it is lowered:
            for `jax.export`, for a platform on which no budget can be enforced, or with `tune` for a program
            that cannot be run now: its device is not here, several processes compile it, or it calls Python.
        ConstraintError: when it is traced: a name in `save`, `recompute` or `offload` that is not in the
            function, or in two of them; when it is planned: a value in `recompute` that cannot be computed
            twice.
        InfeasibleBudgetError: when it is compiled: no plan keeps the budget and the constraints.
        BudgetExceededError: when it is compiled: XLA needs more than planned.
    """
    constraints = _constraints(save, recompute, policy, offload)
    if planner not in PLANNERS:
        raise UnsupportedError(f"planner {planner!r} is not one of {', '.join(map(repr, PLANNERS))}.")
    if planner == "delta":
        raise UnsupportedError("planner 'delta' is a baseline of `coop solve`: no program is compiled by it.")
    if device is not None and device not in DEVICES:
        raise UnsupportedError(f"device {device!r} is not one of {', '.join(map(repr, sorted(DEVICES)))}.")
    if on_fragmentation not in FRAGMENTATION:
        known = ", ".join(map(repr, FRAGMENTATION))
        raise UnsupportedError(f"on_fragmentation {on_fragmentation!r} is not one of {known}.")
    if not isinstance(tune, int) or tune < 0:
        raise UnsupportedError(f"tune is {tune!r}: how many programs are run is a number, such as 3.")
    least = _objective(objective, max_overhead, planner)
    parsed = Budget.of(budget, host)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, classmethod | staticmethod | property):
            kind = type(function).__name__
            raise TypeError(
                f"`coop.remat` decorates a function, not a {kind}: write @{kind} above @coop.remat(...)."
            )
        if not callable(function):
            raise TypeError(
                f"`coop.remat` decorates a function, not a {type(function).__name__}. "
                'A budget is given by name: @coop.remat(budget="8GiB").'
            )
        name = getattr(function, "__name__", type(function).__name__)
        config = RematConfig(
            budget=parsed, planner=planner, device=device, name=name, pin=pin,
            on_fragmentation=on_fragmentation, constraints=constraints, tune=tune, objective=least,
        )  # fmt: skip
        return _decorate(function, config, static_argnums, static_argnames)

    return decorate if fn is None else decorate(fn)


def _decorate(
    function: Callable[..., Any],
    config: RematConfig,
    static_argnums: int | Sequence[int],
    static_argnames: str | Iterable[str],
) -> Callable[..., Any]:
    static = StaticArguments.of(function, static_argnums, static_argnames)
    opened, owner = _opened(function)

    def argument(path: Sequence[Any]) -> str:
        return argument_name(opened, path)

    program = _program(opened, function, config, argument)
    # What runs if there are NNX objects among the arguments, on what they are taken apart to.
    on_parts = _program(nnx.inside(opened), function, config, lambda path: argument(path[1:]))

    @functools.wraps(function, updated=() if owner else functools.WRAPPER_UPDATES)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        asked = relowering.wish()
        if asked is not None and asked.plain:
            return function(*args, **kwargs)
        args, kwargs = static.mark(args, kwargs)
        args = (*owner, *args)
        if nnx.has_nodes((args, kwargs)):
            return nnx.outside(on_parts, args, kwargs)
        return program(*args, **kwargs)

    return wrapper


def _opened(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its first arguments: what a method is bound to, a callable pytree, and an object that a
    class in Python made callable, are arguments."""
    owner, method = getattr(function, "__self__", None), getattr(function, "__func__", None)
    if method is not None and not isinstance(owner, type):
        return method, (owner,)
    is_tree = nnx.has_nodes(function) or not jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    if is_tree or (has_attributes(function) and inspect.isfunction(type(function).__call__)):
        return type(function).__call__, (function,)
    return function, ()


def _program(
    function: Callable[..., Any],
    named: Callable[..., Any],
    config: RematConfig,
    argument: Callable[[Sequence[Any]], str],
) -> Callable[..., Any]:
    """`function` as a program of the arrays among its arguments.

    Args:
        named: whose name and signature it takes.
        argument: what the user calls the argument at a path in (args, kwargs).
    """

    def staged_as(config: RematConfig) -> Callable[..., Any]:
        @functools.wraps(named, updated=())
        def staged(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], Mixed):
                args, kwargs = args[0].open()
            return _stage(function, config, args, kwargs, named, argument)

        return staged

    # `jit` brings the cache and the compile outside `jit`; it leaves no trace inside one.
    staged, apart = staged_as(config), staged_as(dataclasses.replace(config, apart=True))
    call = PinnedCalls(staged) if config.pin else jax.jit(staged, inline=True)
    call_apart = jax.jit(apart, inline=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        held = hold((args, kwargs), names=argument)
        is_apart = compat.is_traced_eagerly()
        if not isinstance(held, Mixed):
            return release((call_apart if is_apart else call)(*args, **kwargs))
        # What hangs on an object's attributes is not remembered where it becomes a part of something larger.
        if held.changes and compat.is_tracing():
            return release((apart if is_apart else staged)(held))
        return release((call_apart if is_apart else call)(held))

    return run


def _stage(
    function: Callable[..., Any],
    config: RematConfig,
    args: Any,
    kwargs: Any,
    named: Callable[..., Any],
    argument: Callable[[Sequence[Any]], str],
) -> Any:
    """Trace `function` to a jaxpr and bind it; leaves that are not arrays stay Python values.

    Args:
        function, config, args, kwargs: the call.
        named, argument: what JAX's errors of the trace call the function and its arguments, as in `_program`.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs))]
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    out_trees = []

    def flat(*values: Any) -> list[Any]:
        given = list(leaves)
        for i, value in zip(dynamic, values, strict=True):
            given[i] = value
        outs, out_tree = jax.tree.flatten(hold(unchanged(function, *jax.tree.unflatten(tree, given))))
        # A result that is an argument, such as a part of an NNX module that was only read, needs no program.
        places = {id(value): n for n, value in enumerate(values) if not compat.is_ref(jax.typeof(value))}
        forwarded = [places.get(id(out)) for out in outs]
        out_trees.append((out_tree, forwarded))
        return [out for out, place in zip(outs, forwarded, strict=True) if place is None]

    operands = [leaves[i] for i in dynamic]
    names = [argument(paths[i]).strip("`") for i in dynamic]
    jaxpr = compat.trace(flat, [jax.typeof(x) for x in operands], (named, names))
    _check_names(jaxpr, config.constraints)
    results = iter(autodiff.bind(jaxpr, config, operands))
    ((out_tree, forwarded),) = out_trees
    return jax.tree.unflatten(out_tree, [next(results) if n is None else operands[n] for n in forwarded])


def _objective(least: str, max_overhead: float | None, planner: str) -> Objective:
    """What is least.

    Raises:
        UnsupportedError: neither time nor energy, no share of the time, or a planner that knows time only.
    """
    try:
        objective = Objective(least=least, max_overhead=max_overhead)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from None
    if least == "energy" and not PLANNERS[planner].frugal:
        knowing = ", ".join(name for name, known in PLANNERS.items() if known.frugal)
        raise UnsupportedError(f"planner {planner!r} knows time only; objective energy is for {knowing}.")
    return objective


def _constraints(save: Any, recompute: Any, policy: Any, offload: Any) -> Constraints:
    """What the user asked about single values.

    Raises:
        ConstraintError: not names, a name in both, or a policy that cannot be called.
    """
    names = {}
    for key, given in (("save", save), ("recompute", recompute), ("offload", offload)):
        several = tuple(given) if isinstance(given, Iterable) else (given,)
        names[key] = (given,) if isinstance(given, str) else several
        if not all(isinstance(name, str) for name in names[key]):
            raise ConstraintError(f"{key}={given!r}: names are strings, as in checkpoint_name(x, 'h').")
    for one, other in itertools.combinations(names, 2):
        if both := sorted({*names[one]} & {*names[other]}):
            raise ConstraintError(f"{', '.join(map(repr, both))} cannot be in `{one}` and in `{other}`.")
    if policy is not None and not callable(policy):
        raise ConstraintError(f"policy={policy!r}: not callable; see `jax.checkpoint_policies`.")
    return Constraints(**names, policy=policy)


def _check_names(closed: ClosedJaxpr, constraints: Constraints) -> None:
    """Refuse names that the function does not give, unless a derivative rule may give them.

    Raises:
        ConstraintError: with the names that it gives.
    """
    jaxpr, _ = compat.open_jaxpr(closed)
    asked = {*constraints.save, *constraints.recompute, *constraints.offload}
    unknown = sorted(asked - names_in(jaxpr)) if asked else []
    if unknown and not compat.has_custom_vjp(jaxpr):
        known = ", ".join(map(repr, sorted(names_in(jaxpr)))) or "none"
        raise ConstraintError(
            f"{', '.join(map(repr, unknown))} in {constraints}: no checkpoint_name in the function gives "
            f"this name; it gives {known}."
        )
