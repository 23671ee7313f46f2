"""Products with vectors, as XLA:GPU computes them: the same values, and what a head of one output stores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import as_known
from passes.jaxpr.straight import as_it_is, lift_as_xla
from passes.jaxpr.vector_dots import with_multiplied_vectors

H200 = DEVICES["h200"]
SIZES = dict(zip("bnkmq", (3, 5, 7, 1, 1), strict=True))
SPECS = (
    "bnk,bkm->bnm", "nk,k->n", "k,k->", "nq,qk->nk", "bmk,bnk->bmn", "nk,km->nm", "kn,k->n", "bn,bn->b",
    "n,k->nk", "bnq,kq->bnk",
)  # fmt: skip


def _opened(function, *args):
    return compat.open_jaxpr(inline_calls(jax.make_jaxpr(function)(*args)))[0]


def _products(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_product_with_a_vector_and_its_gradients_have_the_same_values(spec, dtype):
    def product(x, y):
        return jnp.einsum(spec, x, y)

    def gradients(x, y):
        return jax.grad(lambda *a: (product(*a).astype(jnp.float32) ** 2).sum(), (0, 1))(x, y)

    first, second = spec.split("->")[0].split(",")
    args = [jax.random.normal(jax.random.key(0), [SIZES[c] for c in part], dtype) for part in (first, second)]
    for function in (product, gradients):
        jaxpr = _opened(function, *args)
        written = with_multiplied_vectors(jaxpr, H200)
        check_jaxpr(written)
        assert _products(jaxpr)
        assert not _products(written)
        expected, found = function(*args), compat.evaluate(compat.close_jaxpr(written, []), args)
        for a, b in zip(jax.tree.leaves(expected), found, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32),
                rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5,
            )  # fmt: skip


def test_matrices_and_what_a_library_multiplies_are_left():
    def both(x, w, large, v):
        return x @ w, large @ v

    shapes = (64, 32), (32, 16), (4096, 4096), (4096,)
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = _opened(both, *specs)
    assert with_multiplied_vectors(jaxpr, H200) is jaxpr
    outer = _opened(jnp.outer, specs[3], specs[3])
    assert with_multiplied_vectors(outer, DEVICES["cpu"]) is outer


def test_a_head_with_one_output_is_foreseen_to_store_what_xla_stores(h200):
    """A field that is stepped through time in .04 of its bytes cost 1.27 of a checkpoint around each step:
    two values of its hidden layer were thought to be stored, where XLA stores one."""

    def energy(w, v, x):
        return jnp.sum((jnp.tanh(x @ w) @ v) ** 2)

    n, d = 1 << 14, 64
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, d), (d, 1), (n, 2))]
    gradient = jax.grad(energy, (0, 1))
    compiled = aot.lower_for(gradient, specs, device=h200).compile()
    jaxpr = as_known(_opened(gradient, *specs), H200)
    foreseen_bytes = as_it_is(lift_as_xla(jaxpr, H200)).peak_bytes
    assert foreseen_bytes == pytest.approx(aot.memory(compiled).temp_bytes, rel=0.1)
