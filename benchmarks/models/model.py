"""What every program of the corpus looks like from outside, and the training step that is made of it.

A `Model` is a name, sizes for each target and one function, `net(blocks, **sizes)`, which says how
parameters, a batch and the loss are made. `blocks` says what happens to the model's repeated blocks: nothing,
the package's own option, or `jax.checkpoint` with a ready policy. `program` makes the whole step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coop_jax import aot

PLAIN, OWN = "plain", "own"
# `everything_saveable` keeps what the plain program keeps; those that offload page to the host.
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What happens to each block of a model.

    Attributes:
        way: "plain", "own" (the package's own option), or the name of one of `jax.checkpoint_policies`.
    """

    way: str = PLAIN

    @property
    def own(self) -> bool:
        """True if the package's own option is asked for."""
        return self.way == OWN

    @property
    def policy(self) -> Callable[..., bool] | None:
        """The policy for each block; None for none."""
        return None if self.way in (PLAIN, OWN) else getattr(jax.checkpoint_policies, self.way)

    def wrap(self, block: Callable[..., Any], checkpoint: Callable[..., Any] | None = None) -> Any:
        """A block as it is, or under `checkpoint(block, policy=...)`; by default `jax.checkpoint`."""
        return block if self.policy is None else (checkpoint or jax.checkpoint)(block, policy=self.policy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Net:
    """A model of one size.

    Attributes:
        init: key -> parameters.
        batch: key -> one batch of made-up data.
        loss: (parameters, batch) -> scalar; with `state`: (parameters, state, batch) -> (scalar, state).
        state: key -> what is carried on without a gradient, such as running averages.
    """

    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    state: Callable[[jax.Array], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A program of the corpus.

    Attributes:
        name: such as "gpt2".
        source: the package and class, or "written here" and after what.
        net: (blocks, **sizes) -> the model.
        sizes: keyword arguments of `net` for each target; what has no sizes is not compiled for it.
        optimizer: of `optax`.
        own: what the package's own option is called; empty if it has none.
        devices: over how many the parameters and the batch are spread.
        per_block: False if there are no blocks that a user would wrap.
    """

    name: str
    source: str
    net: Callable[..., Net]
    sizes: Mapping[str, Mapping[str, Any]]
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adamw(3e-4)
    own: str = ""
    devices: int = 1
    per_block: bool = True

    def ways(self) -> tuple[str, ...]:
        """Every way to build it without coop, the plain one first."""
        own = (OWN,) if self.own else ()
        return (PLAIN, *own, *(POLICIES if self.per_block else ()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A whole training step: (carried, batch) -> (carried, loss), `carried` to be donated.

    Attributes:
        step: the function.
        arguments: key -> its arguments, made.
    """

    step: Callable[..., Any]
    arguments: Callable[[jax.Array], tuple[Any, Any]]

    def specs(self) -> tuple[Any, Any]:
        """Shapes and dtypes of the arguments; computes nothing."""
        return jax.eval_shape(self.arguments, jax.random.key(0))


def program(
    model: Model, target: str, way: str = PLAIN, *, around: Around | None = None, whole: bool = True
) -> Program:
    """The training step of a model.

    Args:
        target: which of its sizes.
        way: what happens to its blocks, as in `Blocks`.
        around: such as `coop.remat(budget=...)`.
        whole: True puts `around` around the whole step, False around the loss.
    """
    net, optimizer = model.net(Blocks(way=way), **model.sizes[target]), model.optimizer()
    plain = around is None
    loss = net.loss if plain or whole else around(net.loss)

    def with_state(params: Any, state: Any, batch: Any) -> Any:
        return loss(params, state, batch) if net.state else (loss(params, batch), state)

    def step(carried: Any, batch: Any) -> Any:
        params, state, moments = carried
        (value, state), grads = jax.value_and_grad(with_state, has_aux=True)(params, state, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), state, moments), value

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        params = net.init(key)
        state = net.state(key) if net.state else ()
        return (params, state, optimizer.init(params)), net.batch(jax.random.fold_in(key, 1))

    return Program(step=step if plain or not whole else around(step), arguments=arguments)


def lower(made: Program, where: str | aot.Target | None, *, devices: int = 1) -> Any:
    """Lower a step, what it carries donated.

    Args:
        where: a GPU that need not be here; None is this machine's CPU.
        devices: over how many of them parameters and batch are spread.
    """
    specs = made.specs()
    if devices == 1:
        return aot.lower_for(jax.jit(made.step, donate_argnums=0), specs, device=where)
    here = jax.devices()[:devices] if where is None else aot.devices(where, count=devices)[:devices]
    mesh = Mesh(np.array(here), ("data",))
    placed = spread(specs, mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, placed[0])
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(made.step, donate_argnums=0, out_shardings=(kept, replicated))
    return jitted.lower(*placed)


def spread(specs: tuple[Any, Any], mesh: Mesh) -> tuple[Any, Any]:
    """Fully sharded data parallel: a batch over its first axis, all else over the last axis that divides.

    Args:
        specs: of what a step carries, and of a batch.
        mesh: of one axis, "data".
    """
    count = mesh.devices.size

    def place(leaf: Any, axis: int | None) -> jax.ShapeDtypeStruct:
        parts = ["data" if i == axis else None for i in range(leaf.ndim)]
        sharding = NamedSharding(mesh, PartitionSpec(*parts))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def last(leaf: Any) -> int | None:
        return max((i for i, n in enumerate(leaf.shape) if n >= count and n % count == 0), default=None)

    carried, batch = specs
    return jax.tree.map(lambda s: place(s, last(s)), carried), jax.tree.map(lambda s: place(s, 0), batch)
