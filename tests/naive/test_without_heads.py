"""Naive forms of functions without heads: all options, and derivatives of higher order.

The laws compare the naive forms of other mechanisms; those of mixers come without padding there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.functional.rwkv4 import Sums
from tests.marks import slow_but_for

BATCH, TIME, D = 3, 7, 4
LENGTHS = {"lengths": np.array([TIME, 4, 0])}
PACKED = {"segment_ids": np.array([[4, 4, 2, 2, 2, 0, 0], [1] * TIME, [0] * TIME])}
STATE: dict[str, Any] = {"return_state": True}


def draw(**shapes):
    """Normal arrays by name; complex ones with a negative real part where the shape says so."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


TOKENS = (BATCH, TIME, D)
RWKV4 = {**draw(key=TOKENS, value=TOKENS, bonus=(D,)), "decay": np.linspace(0, 1, D)}
AFT = draw(query=TOKENS, key=TOKENS, value=TOKENS)
GATES = 1 / (1 + np.exp(-np.random.default_rng(3).normal(size=(2, *TOKENS))))
RG_LRU = {"x": AFT["value"], "recurrence_gate": GATES[0], "input_gate": GATES[1]}
RG_LRU["log_decay"] = -np.linspace(0.01, 1, D)
FACTORS = {"position_bias": tuple(draw(u=(9, 2), c=(9, 2)).values())}
SUMS = Sums(*np.random.default_rng(1).uniform(0.1, 1, size=(3, BATCH, D)))
POLES = np.random.default_rng(2).normal(size=(2, D, 2))
POLES = -np.abs(POLES[0]) + 1j * POLES[1]
S4D = {**draw(x=TOKENS, skip=(D,)), "rate": POLES, "output": 2j * POLES}
S4D["step_size"] = np.linspace(0.01, 0.1, D)
S4D_STATE = {"initial_state": np.broadcast_to(POLES, (BATCH, *POLES.shape))}
H3 = {**AFT, **{name: S4D[name][:2] for name in ("rate", "output", "step_size", "skip")}}
S5 = {"x": S4D["x"], "skip": S4D["skip"], "rate": POLES[0], "input": POLES.T}
S5 |= {"output": np.stack([POLES, 2j * POLES]), "step_size": np.array([0.01, 0.1])}
S5_STATE = np.broadcast_to(POLES[1], (BATCH, 2))
HYENA = draw(gates=(2, *TOKENS), value=TOKENS, filters=(2, 9, D), skip=(2, D))
LONG = draw(x=TOKENS, filter=(2, 9, D), skip=(D,))
SMOOTH = {"threshold": 0.2, "smoothing": 1}
GMLP = draw(gate=TOKENS, value=TOKENS, weights=(9, 9), bias=(9,))
DENSE = draw(hidden=(BATCH, 3, 2, 5), table=(TIME, 2, 5), value=(BATCH, TIME, 2, 4))
PRODUCTS = draw(coarse=(BATCH, 3, 2, 2), fine=(BATCH, 3, 2, 4), value=(BATCH, TIME, 2, 4))
SQUARE = draw(coarse=(BATCH, TIME, 2, 2), fine=(BATCH, TIME, 2, 4), value=(BATCH, TIME, 2, 4))
OFFSET = {"is_causal": True, "query_offset": np.array([4, 2, 0])}

CASES = {
    "rwkv4 padded": (effattn.rwkv4_mixing, RWKV4, LENGTHS),
    "rwkv4 packed": (effattn.rwkv4_mixing, RWKV4, {**PACKED, **STATE}),
    "rwkv4 state": (effattn.rwkv4_mixing, {**RWKV4, "initial_state": SUMS}, STATE),
    "rg_lru padded": (effattn.rg_lru, {**RG_LRU, "initial_state": AFT["key"][:, 0]}, LENGTHS),
    "rg_lru packed": (effattn.rg_lru, RG_LRU, {**PACKED, **STATE}),
    "rg_lru state": (effattn.rg_lru, {**RG_LRU, "initial_state": AFT["key"][:, 0]}, STATE),
    "aft_simple padded": (effattn.attention_free, AFT, LENGTHS),
    "aft_simple packed": (effattn.attention_free, AFT, {**PACKED, **STATE, "is_causal": True}),
    "aft_simple state": (
        effattn.attention_free,
        {**AFT, "initial_state": SUMS},
        {**LENGTHS, **STATE, "is_causal": True},
    ),
    "aft_full": (effattn.attention_free, {**AFT, **FACTORS}, LENGTHS),
    "aft_local": (effattn.attention_free, {**AFT, **FACTORS}, {**LENGTHS, "local_window_size": 2}),
    "aft_conv": (
        effattn.attention_free,
        {**AFT, **draw(position_bias=(2, 5))},
        {**LENGTHS, "local_window_size": 2},
    ),
    "aft_full packed": (effattn.attention_free, {**AFT, **FACTORS}, {**PACKED, "is_causal": True}),
    "aft_local packed": (
        effattn.attention_free,
        {**AFT, **FACTORS},
        {**PACKED, **LENGTHS, "local_window_size": 1},
    ),
    "aft_conv packed": (
        effattn.attention_free,
        {**AFT, **draw(position_bias=(2, 5))},
        {**PACKED, "local_window_size": 2},
    ),
    "s4d padded": (effattn.s4_convolution, {**S4D, **S4D_STATE}, {**LENGTHS, **STATE}),
    "s4d packed": (effattn.s4_convolution, S4D, {**PACKED, **STATE}),
    "h3 padded": (effattn.h3_mixing, H3, {**LENGTHS, **STATE}),
    "h3 packed": (effattn.h3_mixing, H3, {**PACKED, **STATE}),
    "s5 both ways": (effattn.s5_scan, S5, PACKED),
    "s5 padded": (
        effattn.s5_scan,
        {**S5, "output": S4D["output"], "initial_state": S5_STATE},
        {**LENGTHS, **STATE, "is_causal": True},
    ),
    "s5 packed": (
        effattn.s5_scan,
        {**S5, "output": S4D["output"]},
        {**PACKED, **STATE, "is_causal": True},
    ),
    "hyena": (effattn.hyena_convolution, HYENA, LENGTHS),
    "long_convolution": (effattn.long_convolution, LONG, {**LENGTHS, **SMOOTH}),
    "long_convolution packed": (effattn.long_convolution, LONG, {**PACKED, **SMOOTH}),
    "hyena packed": (effattn.hyena_convolution, HYENA, PACKED),
    "gmlp": (effattn.spatial_gating, GMLP, {**LENGTHS, "is_causal": True}),
    "gmlp bidirectional": (effattn.spatial_gating, GMLP, LENGTHS),
    "gmlp packed": (effattn.spatial_gating, GMLP, PACKED),
    "synthesizer": (effattn.synthesizer_attention, DENSE, OFFSET),
    "synthesizer_factorized": (
        effattn.factorized_synthesizer_attention,
        PRODUCTS,
        {**LENGTHS, **OFFSET},
    ),
    "synthesizer_factorized square": (effattn.factorized_synthesizer_attention, SQUARE, LENGTHS),
    "synthesizer_factorized packed": (
        effattn.factorized_synthesizer_attention,
        SQUARE,
        {**PACKED, "is_causal": True},
    ),
    "fnet": (effattn.fourier_mixing, draw(x=(2, *TOKENS)), {"norm": "ortho"}),
}
QUICK = (
    "rwkv4 packed",
    "rg_lru packed",
    "aft_simple state",
    "s4d padded",
    "hyena",
    "synthesizer_factorized",
)


@pytest.mark.parametrize("name", slow_but_for(QUICK, CASES))
def test_agrees_with_the_fast_form(name):
    """Values and gradients, in float64."""
    function, arrays, options = CASES[name]

    @jax.jit
    def run(arrays):
        def value_and_gradients(implementation):
            call = functools.partial(function, **options, implementation=implementation)
            out, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
            return out, pull_back(jax.tree.map(jnp.cos, out))

        return value_and_gradients("xla" if "synth" in name else None), value_and_gradients("naive")

    with jax.enable_x64(True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), *run(arrays)
        )


@pytest.mark.parametrize("name", slow_but_for(QUICK, CASES))
def test_has_derivatives_of_higher_order(name):
    """Forward over reverse."""
    function, arrays, options = CASES[name]
    options = {**{n: a for n, a in arrays.items() if np.iscomplexobj(a)}, **options}
    arrays = {n: a for n, a in arrays.items() if n not in options}
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)

    @jax.jit
    def second(arrays):
        def loss(arrays):
            out = jax.tree.leaves(function(**arrays, **options, implementation="naive"))
            return sum(jnp.sum(jnp.abs(x + 2) ** 2) for x in out)

        return jax.jvp(jax.grad(loss), (arrays,), (jax.tree.map(jnp.ones_like, arrays),))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(second(arrays)))


@pytest.mark.parametrize("batch, length", [(0, TIME), (2, 0)])
def test_there_may_be_no_examples_or_no_tokens(batch, length):
    x, one = jnp.ones((batch, length, D)), jnp.ones(D)
    heads = x[:, :, None]
    poles = -jnp.ones((D, 3), jnp.complex64)
    naive = effattn.naive
    for out in (
        naive.rwkv4(x, x, decay=one, bonus=one),
        naive.rg_lru(x, x, x, log_decay=-one),
        naive.aft_simple(x, x, x, is_causal=True),
        naive.s4d(x, rate=poles, output=poles, step_size=one),
        naive.hyena(x[None], x, jnp.ones((1, 8, D))),
        naive.h3(x, x, x, rate=poles, output=poles, step_size=one),
        naive.s5(x, rate=poles[0], input=poles.T, output=poles, step_size=one[:3], is_causal=True),
        naive.long_convolution(x, jnp.ones((2, 8, D))),
        naive.gmlp(x, x, jnp.ones((8, 8)), jnp.ones(8)),
        naive.fnet(x),
        naive.gated_linear(heads, heads, heads, log_decay=-heads)[:, :, 0],
        naive.linear(heads, heads, heads, is_causal=True)[:, :, 0],
        naive.synthesizer_factorized(heads, heads, heads)[:, :, 0],
    ):
        assert out.shape == x.shape


@pytest.mark.parametrize("name", ["mixture_of_mechanisms", "convolution_attention"])
def test_mixers_inside_a_mixer_run_in_naive_forms_too(name):
    """If they are made so."""
    softmax = {"name": "softmax", "implementation": "naive"}
    inner = {
        "mixture_of_mechanisms": {"mechanisms": (softmax, softmax)},
        "convolution_attention": {"attention": softmax},
    }[name]
    mixer = registry.get(name).build(D, 2, rngs=nnx.Rngs(0), **inner)
    x = jnp.asarray(draw(x=TOKENS)["x"], jnp.float32)
    form = functools.partial(getattr(effattn.naive, name), mixer)
    y, tangent = jax.jit(lambda x: jax.jvp(form, (x,), (x,)))(x)
    np.testing.assert_allclose(y, mixer(x), rtol=1e-4, atol=1e-5)
    assert np.any(tangent)
