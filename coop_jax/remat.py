"""The decorator: a function and a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import jax

from coop_jax import autodiff
from coop_jax.budget import Budget
from coop_jax.errors import UnsupportedError
from coop_jax.lowering import RematConfig
from coop_jax.pinning import PinnedCalls
from passes.cost import DEVICES
from passes.hlo.enforce import OnFragmentation
from passes.jaxpr import compat
from passes.planners.config import PLANNERS

compat.hide_frames(__file__)

FRAGMENTATION = ("recompute", "pin", "error")


@overload
def remat[**P, R](fn: Callable[P, R], *, budget: Any = ..., **options: Any) -> Callable[P, R]: ...
@overload
def remat[**P, R](
    fn: None = None, *, budget: Any = ..., **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def remat(
    fn: Callable[..., Any] | None = None,
    *,
    budget: Any = None,
    planner: str = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    policy: Callable[..., bool] | None = None,
    save: Sequence[str] = (),
    recompute: Sequence[str] = (),
    offload: Sequence[str] = (),
    device: str | None = None,
    pin: bool = False,
    on_fragmentation: OnFragmentation = "recompute",
) -> Callable[..., Any]:
    """Hold the compiled program that contains `fn` to a memory budget, by recomputing values.

    Decorate a whole step, with its gradient taken inside, or a function whose gradient is taken; then
    forward and backward are planned together. Values and gradients are those of `fn`. Works under every
    transformation; called outside `jax.jit` it compiles itself. A function with side effects (such as
    `jax.debug.print`) runs them once per call.

    Args:
        fn: the function. Left out, a decorator is returned: `@coop.remat(budget="8GiB")`.
        budget: the peak device memory, per device, of the whole compiled program: bytes, "8GiB", "8 GB",
            "85%" of the device's memory, a float in (0, 1] (that fraction of the program's peak without
            rematerialization), a `coop.Budget`, or None: the device's memory less headroom.
        planner: "auto" (what to use), or one of `passes.planners.config.PLANNERS`: "exact" proves what it
            can about small programs, "dtr" and others are there to compare with.
        static_argnums, static_argnames: arguments that are Python values, as in `jax.jit`.
        policy, save, recompute, offload: not supported yet; anything but the default is refused.
        device: name of the cost model to plan with, such as "h200"; None takes the device's own.
        pin: pack the temporaries of the program anew after its compile (see `coop.pin`), where the function
            is called outside `jax.jit` on a CPU. A program under a `jax.jit` of your own cannot be pinned
            from within: give it to `coop.pin`, lowered or compiled.
        on_fragmentation: what to do where only XLA's packing of the temporaries breaks the budget:
            "recompute" more, "pin" (count on pinning; where nobody pins the program, recompute), or "error".

    Returns:
        A function of the same signature.

    Raises:
        BudgetError: the budget is none of the accepted forms.
        UnsupportedError: an option that does not exist yet, an unknown planner or device.
        InfeasibleBudgetError: when it is compiled: no plan keeps the budget.
        BudgetExceededError: when it is compiled: XLA needs more than planned.
    """
    _refuse_unsupported(policy=policy, save=save, recompute=recompute, offload=offload)
    if planner not in PLANNERS:
        raise UnsupportedError(f"planner {planner!r} is not one of {', '.join(map(repr, PLANNERS))}.")
    if device is not None and device not in DEVICES:
        raise UnsupportedError(f"device {device!r} is not one of {', '.join(map(repr, sorted(DEVICES)))}.")
    if on_fragmentation not in FRAGMENTATION:
        known = ", ".join(map(repr, FRAGMENTATION))
        raise UnsupportedError(f"on_fragmentation {on_fragmentation!r} is not one of {known}.")
    if pin and (static_argnums != () or static_argnames != ()):
        raise UnsupportedError(
            "pin=True with static arguments: leave `pin` out and give the lowered program to `coop.pin`."
        )
    parsed = Budget.of(budget)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(
                f"`coop.remat` decorates a function, not a {type(function).__name__}. "
                'A budget is given by name: @coop.remat(budget="8GiB").'
            )
        name = getattr(function, "__name__", type(function).__name__)
        config = RematConfig(
            budget=parsed, planner=planner, device=device, name=name, pin=pin,
            on_fragmentation=on_fragmentation,
        )  # fmt: skip
        return _decorate(function, config, static_argnums, static_argnames)

    return decorate if fn is None else decorate(fn)


def _decorate(
    function: Callable[..., Any],
    config: RematConfig,
    static_argnums: int | Sequence[int],
    static_argnames: str | Iterable[str],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def staged(*args: Any, **kwargs: Any) -> Any:
        return _stage(function, config, args, kwargs)

    # `jit` brings the cache, static arguments and the compile outside `jit`; it leaves no trace inside one.
    # Where nothing is named static, None lets `jit` find the numbers of static names and the reverse.
    static: dict[str, Any] = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    jitted = jax.jit(staged, inline=True, **{k: None if v == () else v for k, v in static.items()})
    call = PinnedCalls(jitted) if config.pin else jitted

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return wrapper


def _stage(function: Callable[..., Any], config: RematConfig, args: Any, kwargs: Any) -> Any:
    """Trace `function` to a jaxpr and bind it; leaves that are not arrays stay Python values."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    out_trees = []

    def flat(*values: Any) -> list[Any]:
        given = list(leaves)
        for i, value in zip(dynamic, values, strict=True):
            given[i] = value
        inner_args, inner_kwargs = jax.tree.unflatten(tree, given)
        outs, out_tree = jax.tree.flatten(function(*inner_args, **inner_kwargs))
        out_trees.append(out_tree)
        return outs

    operands = [leaves[i] for i in dynamic]
    jaxpr = compat.trace(flat, [compat.typeof(x) for x in operands])
    results = _with_refs(jaxpr, config, operands)
    return jax.tree.unflatten(out_trees[0], results)


def _with_refs(jaxpr: Any, config: RematConfig, operands: Sequence[Any]) -> list[Any]:
    """Bind `jaxpr`; mutable references that it takes or closes over are read before and written after."""
    jaxpr, consts = compat.hoist_consts(jaxpr)
    operands = [*consts, *operands]
    refs = [x for x in operands if compat.is_ref(compat.typeof(x))]
    values = [x[...] if compat.is_ref(compat.typeof(x)) else x for x in operands]
    results = autodiff.bind(compat.without_refs(jaxpr), config, values)
    cut = len(results) - len(refs)
    for ref, value in zip(refs, results[cut:], strict=True):
        ref[...] = value
    return results[:cut]


def _refuse_unsupported(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise UnsupportedError(
                f"{name}={value!r}: constraints on what is saved are not supported yet, and `coop.remat` "
                f"ignores none silently. Leave `{name}` out: the budget alone decides. Or use "
                "`jax.checkpoint` with a policy."
            )
