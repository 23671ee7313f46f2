"""The decorator: how it may be written, what may be passed, what is refused, what it costs."""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from coop_jax import mark
from coop_jax.budget import Budget
from coop_jax.errors import BudgetError, UnsupportedError
from coop_jax.record import read_attributes
from coop_jax.remat import remat

X = jnp.arange(12.0).reshape(3, 4)
LARGE = "1TiB"


def test_bare_and_with_arguments_keep_name_and_value() -> None:
    @remat
    def bare(x: Any) -> Any:
        """Doc."""
        return x * 2

    @remat(budget=LARGE, planner="cut")
    def written_out(x: Any) -> Any:
        return x * 2

    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Doc."
    np.testing.assert_array_equal(bare(X), X * 2)
    np.testing.assert_array_equal(written_out(X), X * 2)
    np.testing.assert_array_equal(remat(lambda x: x * 2, budget=LARGE)(X), X * 2)


def test_pytrees_keywords_defaults_and_none() -> None:
    def step(state: dict[str, Any], *, scale: Any = 2.0, extra: Any = None) -> dict[str, Any]:
        assert extra is None
        return {"w": [w * scale for w in state["w"]], "count": state["count"] + 1}

    state = {"w": [X, X + 1], "count": jnp.asarray(3)}
    found = jax.jit(remat(step, budget=LARGE))(state, scale=3.0)
    jax.tree.map(np.testing.assert_array_equal, found, step(state, scale=3.0))
    jax.tree.map(np.testing.assert_array_equal, remat(step, budget=LARGE)(state), step(state))


def test_static_arguments_by_number_and_name_are_python_values() -> None:
    def power(x: Any, n: int, mode: str = "sum") -> Any:
        assert isinstance(n, int)
        assert isinstance(mode, str)
        return getattr(x**n, mode)()

    by_number = remat(power, budget=LARGE, static_argnums=(1, 2))
    by_name = remat(power, budget=LARGE, static_argnames=("n", "mode"))
    np.testing.assert_allclose(by_number(X, 3, "mean"), power(X, 3, "mean"))
    np.testing.assert_allclose(by_name(X, n=2, mode="sum"), power(X, 2))
    np.testing.assert_allclose(jax.grad(by_number)(X, 2), 2 * X)
    np.testing.assert_allclose(jax.jit(lambda x: by_name(x, n=2))(X), power(X, 2))
    first = remat(lambda n, x: x * range(n)[-1], budget=LARGE, static_argnums=0)
    np.testing.assert_allclose(first(3, X), 2 * X)


def test_methods_keys_and_integers() -> None:
    class Model:
        scale = 2.0

        def apply(self, x: Any, key: Any, rows: Any) -> Any:
            return (jax.random.normal(key, x.shape) * x * self.scale)[rows]

    model, key, rows = Model(), jax.random.key(0), jnp.array([0, 2])
    found = jax.jit(remat(model.apply, budget=LARGE))(X, key, rows)
    np.testing.assert_array_equal(found, jax.jit(model.apply)(X, key, rows))


def test_eval_shape_and_make_jaxpr_see_the_decorated_function() -> None:
    decorated = remat(lambda x: (x.sum(), x.astype(jnp.int32)), budget=LARGE)
    shapes = jax.eval_shape(decorated, X)
    assert [(s.shape, str(s.dtype)) for s in shapes] == [((), "float32"), ((3, 4), "int32")]
    assert "coop_remat" in str(jax.make_jaxpr(decorated)(X))


def test_disable_jit_runs_the_function() -> None:
    with jax.disable_jit():
        np.testing.assert_array_equal(remat(lambda x: x * 2, budget=LARGE)(X), X * 2)


def test_calls_outside_jit_compile_once() -> None:
    traces = []

    @remat(budget=LARGE)
    def f(x: Any) -> Any:
        traces.append(x.shape)
        return x + 1

    for _ in range(3):
        f(X)
    assert traces == [(3, 4)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("under_jit", [False, True])
def test_effects_happen_once_per_call(
    ordered: bool, under_jit: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("seen {}", x.sum(), ordered=ordered)
        return (jnp.sin(x) ** 2).sum()

    decorated = remat(f, budget=LARGE)
    run = jax.jit(decorated) if under_jit else decorated
    value = run(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 66.0") == 1
    np.testing.assert_allclose(value, (jnp.sin(X) ** 2).sum(), rtol=1e-6)


def test_effects_happen_once_per_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("seen {}", x.sum())
        return (jnp.sin(x) ** 2).sum()

    jax.block_until_ready(jax.jit(jax.grad(remat(f, budget=LARGE)))(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 66.0") == 1


def test_host_callbacks_work() -> None:
    def f(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()

    np.testing.assert_allclose(jax.jit(remat(f, budget=LARGE))(X), 2 * X.sum())


def test_what_is_offloaded_is_kept_where_nothing_can_be_paged() -> None:
    def f(x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.tanh(x), "h")).sum()

    kept = jax.jit(jax.grad(remat(f, budget=LARGE, offload=["h"])))
    np.testing.assert_allclose(kept(X), jax.grad(f)(X), rtol=1e-6)


def test_nonsense_is_refused_when_decorating() -> None:
    with pytest.raises(BudgetError, match="8g"):
        remat(lambda x: x, budget="8g")
    with pytest.raises(UnsupportedError, match="'auto', 'window', 'cut'"):
        remat(lambda x: x, budget=LARGE, planner="best")
    with pytest.raises(UnsupportedError, match="'h200'"):
        remat(lambda x: x, budget=LARGE, device="tpu")
    with pytest.raises(TypeError, match=re.escape("@coop.remat(budget=")):
        remat("8GiB")  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [classmethod, staticmethod, property])
def test_what_a_class_makes_of_a_function_is_decorated_inside(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"write @{kind.__name__} above @coop.remat"):
        remat(kind(lambda x: x), budget=LARGE)


def test_errors_of_a_trace_name_the_users_function_and_argument() -> None:
    def step(state: Any, batch: Any, *, flag: Any) -> Any:
        return state if batch["m"] > 1 else state * flag

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        remat(step, budget=LARGE)(X, {"k": X, "m": 2}, flag=1)
    text = str(error.value)
    assert f"the function step at {__file__}" in text
    assert "argument batch['m']" in text


def instructions(compiled: Any) -> list[str]:
    """Optimised instructions without metadata, named by their place instead of their number."""
    names: dict[str, str] = {}
    lines = [line for line in compiled.as_text().splitlines() if " = " in line]
    bare = [re.sub(r", (?:metadata|backend_config)=\{.*", "", line) for line in lines]
    return [
        re.sub(r"[A-Za-z_][\w-]*\.[\d.]+", lambda m: names.setdefault(m[0], f"n{len(names)}"), x)
        for x in bare
    ]


def marks_of(compiled: Any) -> list[str]:
    """The keys of a program's mark, none if it has no mark."""
    data = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return sorted(key for key in read_attributes(data) if key.startswith("coop."))


def blocks(w: Any, x: Any) -> Any:
    for _ in range(4):
        x = jnp.tanh(x @ w) * jax.nn.gelu(x)
    return jnp.mean(x**2)


def sgd(w: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(blocks)(w, x)
    return value, w - 0.1 * gradient


W = jnp.eye(4) + 0.1


@pytest.mark.parametrize(
    ("plain", "decorated"),
    [
        (sgd, remat(sgd, budget=LARGE)),
        (jax.grad(blocks), jax.grad(remat(blocks, budget=LARGE))),
        (
            jax.value_and_grad(blocks, argnums=(0, 1)),
            jax.value_and_grad(remat(blocks, budget=1.0), argnums=(0, 1)),
        ),
    ],
    ids=["whole step", "grad", "value_and_grad"],
)
def test_a_budget_that_is_met_changes_nothing_but_the_mark(plain: Any, decorated: Any) -> None:
    one = jax.jit(plain, donate_argnums=0).lower(W, X).compile()
    two = jax.jit(decorated, donate_argnums=0).lower(W, X).compile()
    assert len(instructions(one)) > 20
    assert instructions(one) == instructions(two)
    assert marks_of(one) == []
    assert marks_of(two) == ["coop.facts", "coop.record"]


def test_a_large_budget_recomputes_nothing() -> None:
    plain, decorated = jax.make_jaxpr(sgd)(W, X), remat(sgd, budget=LARGE)
    compiled = jax.jit(decorated).lower(W, X).compile()
    record = mark.record_of(compiled)
    assert record is not None
    assert record.jaxpr is not None
    assert record.hlo is not None
    assert record.jaxpr.recomputed == record.hlo.recomputed == ()
    assert not record.jaxpr.changed
    assert not record.hlo.changed
    lowered = jax.jit(decorated).lower(W, X).as_text()
    assert str(plain).count("dot_general") == lowered.count("stablehlo.dot_general")


class _ByValue(pickle.Pickler):
    """Pickles functions within functions as cloudpickle does: their code and what they close over."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType) or "<locals>" not in value.__code__.co_qualname:
            return NotImplemented
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        module = value.__globals__["__name__"]
        return _function, (marshal.dumps(value.__code__), module, value.__defaults__, held)


def _function(code: bytes, module: str, defaults: Any, held: Any) -> Any:
    scope = vars(importlib.import_module(module))
    return types.FunctionType(marshal.loads(code), scope, None, defaults, tuple(map(types.CellType, held)))


@pytest.mark.parametrize("options", [{}, {"pin": True}, {"static_argnums": 1}], ids=str)
def test_a_decorated_local_function_is_pickled_before_and_after_it_ran(options: Any) -> None:
    @remat(budget=LARGE, **options)
    def scaled(x: Any, times: int) -> Any:
        return x * times

    for _ in range(2):
        file = io.BytesIO()
        _ByValue(file).dump(scaled)
        np.testing.assert_array_equal(pickle.loads(file.getvalue())(X, 2), X * 2)
        np.testing.assert_array_equal(scaled(X, 2), X * 2)


def test_budget_object_and_percent() -> None:
    for budget in (Budget(device="1GiB", headroom="1MiB"), "50%", None):
        compiled = jax.jit(remat(sgd, budget=budget)).lower(W, X).compile()
        record = mark.record_of(compiled)
        assert record is not None
        assert record.budget == str(Budget.of(budget))
        assert record.budget_bytes > 10**6
