"""Products and convolutions in the form in which XLA:CPU computes them: the same values, and no copy more."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr

from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.canonical import with_canonical_products
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import as_known, lift
from passes.jaxpr.scalar_work import library_numbers

PRODUCTS = (
    "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "bhqk,bhqd->bhkd", "bhqd,bhkd->bhqk", "btd,df->btf", "btd,btf->df",
    "btf,df->btd", "btf,btd->df", "bhqd,bhqd->bh", "btkgh,bskh->bkgts", "bi,bj->ij", "bi,bj->bij",
    "btd,d->bt",
    "qhbd,khbd->hbqk",
)  # fmt: skip
SIZES = dict(zip("bqhdktfgsij", (2, 5, 3, 8, 7, 5, 6, 2, 4, 3, 9), strict=True))


def _opened(function, *args):
    return compat.open_jaxpr(inline_calls(jax.make_jaxpr(function)(*args)))[0]


def _values(spec: str, times: int = 1) -> list[jax.Array]:
    shapes = [tuple(times * SIZES[c] for c in part) for part in spec.split("->")[0].split(",")]
    return [jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes)]


def _same(function, args) -> None:
    jaxpr = _opened(function, *args)
    changed = with_canonical_products(jaxpr)
    check_jaxpr(changed)
    expected = jax.jit(function)(*args)
    found = jax.jit(lambda *xs: compat.evaluate(compat.close_jaxpr(changed, []), xs))(*args)
    for a, b in zip(jax.tree.leaves(expected), found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", PRODUCTS)
def test_a_product_and_its_gradients_are_the_same_bits(spec):
    def product(x, y):
        return jnp.einsum(spec, x, y)

    args = _values(spec)
    _same(product, args)
    _same(lambda x, y: jax.grad(lambda *a: (product(*a) ** 2).sum(), (0, 1))(x, y), args)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("groups", "features"), [(1, 8), (4, 8), (4, 4)])
@pytest.mark.parametrize("spec", ["NHWC,HWIO,NHWC", "NCHW,OIHW,NCHW", "HWNC,OHWI,HCNW"])
def test_a_convolution_and_its_gradients_are_the_same_bits(spec, groups, features, stride):
    spec = spec.split(",")
    sizes = {"N": 4, "H": 6, "W": 6, "C": 4, "I": 4 // groups, "O": features}
    window = {**sizes, "H": 3, "W": 3}
    x = jax.random.normal(jax.random.key(0), [sizes[c] for c in spec[0]])
    w = jax.random.normal(jax.random.key(1), [window[c] for c in spec[1]])

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=spec, feature_group_count=groups
        )

    _same(convolve, [x, w])
    _same(lambda x, w: jax.grad(lambda *a: (convolve(*a) ** 2).sum(), (0, 1))(x, w), [x, w])


@pytest.mark.parametrize("spec", PRODUCTS)
def test_as_many_copies_are_expected_as_xla_makes(spec):
    def product(x, y):
        return jnp.einsum(spec, x, y)

    args = _values(spec, 8)
    text = jax.jit(product).lower(*args).compile().as_text()
    entry = text[text.index("ENTRY") :]
    copies = re.findall(r"%[\w.]*(?:copy|transpose)[\w.]* = .* fusion", entry)
    program = lift(_opened(product, *args), DEVICES["cpu"], as_xla=True).program
    assert len([op for op in program.ops if op.name == "transpose"]) == len(copies), entry


F8 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.mark.parametrize("result", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("left", "right"), [(F8[0], F8[0]), (F8[0], F8[1])])
def test_operands_of_eight_bits_are_stored_as_wide_as_xla_stores_them(left, right, result):
    """A float8 training step was expected to need 187 of 337 MiB: both passes read operands in float32."""

    def product(x, y):
        x, y = jnp.sin(x).astype(left), jnp.cos(y).astype(right)
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=result)

    args = jax.random.normal(jax.random.key(0), (96, 64)), jax.random.normal(jax.random.key(1), (64, 80))
    _same(product, args)
    entry = jax.jit(product).lower(*args).compile().as_text()
    entry = entry[entry.index("ENTRY") :]
    (names,) = re.findall(r"ynn[\w.]* = \w+\[96,80\]\S* fusion\((.*?)\)", entry)
    stored = [re.search(rf"{name} = (\w+)\[", entry).group(1) for name in names.split(", ")]
    known = as_known(_opened(product, *args), DEVICES["cpu"])
    (found,) = [eqn for eqn in known.eqns if eqn.primitive.name == "dot_general"]
    short = {"float32": "f32", "bfloat16": "bf16"}
    assert [short.get(v.aval.dtype.name) for v in found.invars] == stored


def test_a_product_whose_transpose_is_written_twice_is_in_its_form_at_once():
    def twice(x: jax.Array, y: jax.Array) -> jax.Array:
        product = x @ y
        return jnp.tanh(product.T) + jnp.sin(product.T)

    known = as_known(_opened(twice, jnp.ones((64, 32)), jnp.ones((32, 16))), DEVICES["cpu"])
    assert not [eqn for eqn in known.eqns if eqn.primitive.name == "transpose"]
    assert as_known(known, DEVICES["cpu"]) is known, (
        "what is emitted of it is compared with it, place by place"
    )


@pytest.mark.parametrize(
    ("features", "results", "groups", "is_library"),
    [(32, 32, 32, False), (48, 16, 16, False), (16, 16, 1, True)],
)
@pytest.mark.parametrize("spec", ["NHWC,HWIO,NHWC", "NHWC,HWOI,NHWC", "NCHW,OIHW,NCHW"])
def test_in_the_body_of_a_loop_a_convolution_has_the_form_that_costs_less(
    spec, features, results, groups, is_library
):
    """XLA:CPU writes convolutions in a library's form outside of loops alone. In them depthwise ones take the
    library 3 to 59 times as long as its own loops: a neural automaton in the bytes of a checkpoint took 2.4
    times its time (measured), now .8, and was thought to take as long in either form."""
    spec, sizes = (
        spec.split(","),
        {"N": 1, "H": 16, "W": 16, "C": features, "I": features // groups, "O": results},
    )
    x = jnp.ones([sizes[c] for c in spec[0]])
    w = jnp.ones([{**sizes, "H": 3, "W": 3}[c] for c in spec[1]])

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=spec, feature_group_count=groups
        )

    def repeated(x, w):
        return lax.scan(lambda c, _: (c, convolve(c, w).sum()), x, None, length=3)

    inside = dataclasses.replace(DEVICES["cpu"], in_body=True)
    jaxpr = _opened(convolve, x, w)
    written = with_canonical_products(jaxpr, inside)
    (found,) = [eqn for eqn in written.eqns if eqn.primitive.name == "conv_general_dilated"]
    is_in_form = found.params["dimension_numbers"] == library_numbers(4)
    assert is_in_form == is_library
    assert with_canonical_products(written, inside) is written
    evaluated = compat.evaluate(compat.close_jaxpr(written, []), [x, w])
    np.testing.assert_allclose(evaluated[0], convolve(x, w), rtol=1e-5)
    text = jax.jit(repeated).lower(x, w).compile().as_text()
    (own,) = re.findall(r"convolution\(.*dim_labels=([\w?>-]+)", text)
    assert (own == "b01f_01io->b01f") == (spec[1] == "HWIO"), "XLA leaves it as it comes"
