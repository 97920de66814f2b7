"""The linear recurrence by the CPU kernels, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import runtime
from effattn.testing.functions import assert_close
from tests.pallas.recurrence_cases import (
    assert_near,
    documents,
    draw,
    errors,
    exact,
    of_documents,
    one_document,
    recurrence,
    with_gradients,
)

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

of_kernels = functools.partial(recurrence, names=("llvm",), interpreted=False)

# Tokens; decay and form; query, key and value heads; features and values; and whether normalised.
CASES = {
    "a token": (1, "feature", "own", (4, 2, 2), (3, 5), False),
    "chunks and a part": (130, "none", "plain", (1, 1, 1), (17, 33), True),
    "whole chunks": (64, "head", "plain", (4, 2, 2), (70, 66), True),
    "value heads": (130, "token", "delta", (2, 2, 4), (16, 80), True),
    "values of a key head": (40, "token", "own", (1, 1, 3), (8, 8), False),
    "decay of features": (130, "feature", "plain", (4, 2, 2), (70, 20), False),
    "delta of features": (130, "feature", "delta", (2, 2, 2), (33, 5), False),
    "own removed": (130, "feature", "own", (4, 2, 2), (20, 20), True),
    "delta": (100, "none", "delta", (4, 2, 2), (16, 16), False),
    "bonus": (100, "none", "bonus", (4, 2, 2), (5, 6), False),
    "bonus of features": (130, "feature", "bonus", (4, 2, 2), (20, 6), False),
    "bonus of value heads": (50, "token", "bonus", (1, 1, 2), (5, 6), False),
    "several blocks": (600, "token", "delta", (2, 2, 2), (150, 140), False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_one_token_at_a_time(name):
    length, decay, form, heads, sizes, normalized = CASES[name]
    args = draw(length, decay, heads, sizes, normalized, form)
    ours = with_gradients(functools.partial(of_kernels, normalized=normalized), *args)
    assert_near(ours, exact(*args, normalized=normalized))


@pytest.mark.usefixtures("lanes")
def test_vectors_of_every_width_agree():
    args = draw(50, "feature", (4, 2, 2), (17, 33), False, "own")
    assert_near(with_gradients(of_kernels, *args), exact(*args))


@pytest.mark.parametrize(
    ("decay", "form", "normalized"),
    [
        ("none", "plain", True),
        ("token", "plain", False),
        ("feature", "plain", False),
        ("feature", "bonus", False),
        ("token", "delta", False),
        ("feature", "own", True),
    ],
)
def test_documents_and_masks(decay, form, normalized):
    args = draw(103, decay, (4, 2, 2), (5, 6), normalized, form)
    tokens, given = documents(), {"names": ("llvm",), "interpreted": False}
    ours = of_documents(*args, tokens, normalized=normalized, **given)
    assert_near(ours, exact(*args, tokens=tokens, normalized=normalized))


@pytest.mark.parametrize("decay", ["token", "feature"])
@pytest.mark.parametrize("form", ["plain", "delta"])
def test_decays_that_forget_much_or_all(decay, form):
    """As exact as the XLA form; gradients do not pass through a decay of zero."""
    terms, state = draw(103, decay, (4, 2, 2), (5, 6), form=form)
    strong = 40 * terms.log_decay
    strong[:, 20], strong[:, 66] = -1e4, -np.inf
    args = terms._replace(log_decay=strong), state
    expected = exact(*args, one_document())
    ours = of_documents(*args, one_document(), names=("llvm",), interpreted=False)
    xla = of_documents(*args, one_document(), names=("xla",))
    assert not np.any(ours[1][0].log_decay[:, 66])
    for error, other, size in errors(ours, xla, expected):
        assert error <= max(2 * other, 1e-6 * size)


@pytest.mark.parametrize("decay", ["head", "feature"])
def test_slow_decays_stay_exact_over_many_chunks(decay):
    """The error of a decay near 1 does not grow with the number of chunks."""
    terms, state = draw(4096, decay, (1, 1, 1), (4, 5))
    terms = terms._replace(log_decay=np.full_like(terms.log_decay, -1e-4), value=terms.value * 0)
    (ours, after), _ = with_gradients(of_kernels, terms, state)
    (expected, after_exact), _ = exact(terms, state)
    assert_close((ours, after), (expected, after_exact), 2e-6)


def test_nothing_of_an_earlier_document_remains():
    """Not even a rounding error: the results are equal bit for bit."""
    terms, state = draw(103, "token", (2, 2, 2), (5, 6), form="delta")
    tokens = documents()
    starts = np.flatnonzero(tokens.starts[0])
    last = starts[-1]
    changed = jax.tree.map(np.array, terms)
    changed.value[0, :last] *= 30
    ours, other = (of_kernels(each, state, tokens)[0][0, last:] for each in (terms, changed))
    np.testing.assert_array_equal(ours, other)


def test_no_token_before_a_change_notices_it():
    """Earlier outputs stay equal bit for bit, on either side of a chunk's edge."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 200, 2, 8)).astype(np.float32) for _ in range(3)]
    call = functools.partial(effattn.linear_attention, is_causal=True, implementation="llvm")
    before = call(*arrays)
    for token in (15, 16, 199):
        changed = [np.array(x) for x in arrays]
        for x in changed:
            x[:, token:] += 1
        after = call(*changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert (before[:, token] != after[:, token]).any()


@pytest.mark.parametrize("feature_map", ["elu", "identity"])
def test_hessians_are_those_of_xla(feature_map):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 20, 1, 3)).astype(np.float32)

    def loss(query, implementation):
        call = functools.partial(effattn.linear_attention, is_causal=True, feature_map=feature_map)
        return jnp.sum(call(query, key, value, implementation=implementation) ** 2)

    ours, theirs = (jax.hessian(loss)(query, name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-5)


def test_hessians_of_the_delta_rule_in_documents_are_those_of_xla():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 20, 1, 3)).astype(np.float32)
    log_decay, beta = -rng.random((20, 1, 3)).astype(np.float32), rng.random((20, 1))

    def loss(log_decay, implementation):
        out = effattn.delta_rule_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            beta=beta.astype(np.float32),
            segment_ids=np.repeat([1, 2], [7, 13]),
            implementation=implementation,
        )
        return jnp.sum(out**2)

    ours, theirs = (jax.hessian(loss)(log_decay, name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-5)


def test_hessians_with_more_value_heads_than_key_heads_are_those_of_xla():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 20, 1, 3)).astype(np.float32)
    value = rng.normal(size=(20, 2, 3)).astype(np.float32)
    step, rate = rng.random((20, 2)).astype(np.float32), -np.ones(2, np.float32)

    def loss(query, implementation):
        call = functools.partial(effattn.state_space_duality, step_size=step, rate=rate)
        return jnp.sum(call(query, key, value, implementation=implementation) ** 2)

    ours, theirs = (jax.hessian(loss)(query, name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-5)


def test_its_memory_does_not_grow_with_length():
    """Apart from arguments and results, memory is that of one block of tokens."""

    def temporaries(tokens):
        shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)] * 3
        call = functools.partial(effattn.linear_attention, is_causal=True, implementation="llvm")
        return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(65536) <= 1.01 * temporaries(8192)


def test_it_says_what_it_does_not_take():
    query = np.ones((1, 20, 2, 8), np.float32)
    with pytest.raises(NotImplementedError, match="does not take value_log_decay"):
        effattn.gated_slot_attention(query, query, query, log_decay=-query, implementation="llvm")
