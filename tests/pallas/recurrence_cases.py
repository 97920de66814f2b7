"""Cases for the kernels of the linear recurrence, and the comparisons of their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch
from effattn.cores.documents import packed
from effattn.cores.linear_recurrence import linear_recurrence
from effattn.interfaces.linear_recurrence import Config, Terms, Tokens
from effattn.testing.functions import assert_close
from tests.marks import slow
from tests.xla.test_linear_recurrence import ALL, as_they_are, token_by_token

PACKED = [[1] * 3 + [2] * 60 + [5] * 40, [0] * 2 + [7] * 62 + [3] + [4] * 31 + [0] * 7]


def draw(length, decay, heads, sizes, normalized=False, form="plain", seed=0):
    """Terms and a state, float32, for two examples: N, K and V heads, F features and D values.

    The form is "plain", "bonus", "delta" or "own"; a token of the delta form removes about half of
    the state along its key, and "own" is a delta form whose removed vectors differ from the keys.
    """
    rng = np.random.default_rng(seed)
    (queries, keys, values), (features, size) = heads, sizes

    def numbers(*shape, low=-1.0):
        return rng.uniform(low, 1, shape).astype(np.float32)

    log_decay = {
        "none": None,
        "head": -numbers(values, low=0.01) / 5,
        "token": -numbers(2, length, values, low=0) / 5,
        "feature": -numbers(2, length, keys, features, low=0) / 5,
    }[decay]
    low = 0.1 if normalized else -1.0
    terms = Terms(
        numbers(2, length, queries, features, low=low),
        numbers(2, length, keys, features, low=low),
        numbers(2, length, values, size),
        log_decay,
        numbers(keys, features, low=low) if form == "bonus" else None,
    )
    if form in ("delta", "own"):
        along = terms.key / (2 * np.sum(terms.key**2, -1, keepdims=True))
        terms = terms._replace(recalled=along + numbers(*terms.key.shape) / (4 * features))
    if form == "own":
        turned = terms.key + numbers(*terms.key.shape) / 4
        terms = terms._replace(removed=turned.astype(np.float32))
    return terms, numbers(2, values, features, size + normalized, low=low)


def recurrence(terms, state, tokens=ALL, normalized=False, names=("triton",), interpreted=True):
    shared = {"bonus": terms.bonus}
    if terms.log_decay is not None and terms.log_decay.ndim == 1:
        shared, terms = {**shared, "log_decay": terms.log_decay}, terms._replace(log_decay=None)
    keys = tuple(terms._replace(bonus=None))[1:]
    chosen = dispatch.Chosen(names, interpreted)
    config = Config(as_they_are, terms.value.dtype, normalized, implementations=chosen)
    return linear_recurrence(config, shared, state, terms.query, keys, tokens)


def with_gradients(function, terms, state):
    """Values, and the gradients of everything for fixed cotangents of the output and the state."""

    return jax.jit(functools.partial(_with_gradients, function))(terms, state)


def of_documents(terms, state, tokens, **given):
    """`with_gradients` of `recurrence`, compiled once for all documents and masks of 103 tokens."""
    return _of_documents(tuple(given.items()), terms, state, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _of_documents(given, terms, state, tokens):
    return _with_gradients(
        functools.partial(recurrence, tokens=tokens, **dict(given)), terms, state
    )


def _with_gradients(function, terms, state):
    results, pull_back = jax.vjp(function, terms, state)
    # The cotangents have the same values in every dtype.
    cotangents = [(np.arange(x.size).reshape(x.shape) % 7 - 3) / 4 for x in results]
    return results, pull_back(tuple(map(jnp.astype, cotangents, (x.dtype for x in results))))


def exact(terms, state, tokens=ALL, normalized=False):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (terms, state))
        return _exact(*wide, tokens, normalized)


@functools.partial(jax.jit, static_argnames="normalized")
def _exact(terms, state, tokens, normalized):
    function = functools.partial(token_by_token, tokens=tokens, normalized=normalized)
    return _with_gradients(function, terms, state)


def errors(ours, others, expected):
    """Root mean squares of each array: our errors, the others' errors, and the size."""
    for a, b, c in zip(*map(jax.tree.leaves, (ours, others, expected)), strict=True):
        assert a.dtype == b.dtype
        yield tuple(np.sqrt(np.mean(np.square(np.float64(x)))) for x in (a - c, b - c, c))


def assert_near(ours, expected):
    """Checks results; the tolerance is larger for gradients of decays, whose sums may cancel."""

    def apart(results):
        values, (terms, state) = results
        return (values, terms._replace(log_decay=None), state), terms.log_decay

    for one, other, rtol in zip(apart(ours), apart(expected), (2e-6, 1e-5), strict=True):
        assert_close(one, other, rtol)


def documents():
    """Packed documents of 103 tokens, some of which are masked."""
    rng = np.random.default_rng(5)
    masks = (jnp.asarray(rng.random((2, 103)) < 0.8) for _ in range(2))
    return packed(jnp.asarray(PACKED), Tokens(*masks))


def one_document():
    """One document of all 103 tokens, in the same form as `documents`."""
    every = jnp.ones((2, 103), bool)
    return packed(jnp.ones((2, 103), int), Tokens(every, every))


sixteen_bit_forms = pytest.mark.parametrize(
    ("decay", "form", "normalized"),
    [
        ("token", "plain", False),
        slow("none", "plain", True),
        slow("feature", "bonus", False),
        slow("feature", "delta", False),
    ],
)


def in_both_widths(name, decay, form, normalized, dtype, scale=0.3):
    """Results and gradients of a 16-bit call, and of the same numbers in float32.

    The queries have a scale. The outputs of both calls, and the cotangents, have 16 bits.
    """
    terms, state = draw(103, decay, (4, 2, 2), (5, 6), normalized, form)
    bonus = terms.bonus
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), tuple(terms._replace(bonus=None)))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)

    def scaled(parameters, query, keys):
        return Terms(query * parameters[0], *keys)._replace(bonus=parameters[1])

    config = Config(scaled, dtype, normalized, implementations=dispatch.Chosen((name,), True))

    @jax.jit
    def run(terms, state):
        def attend(parameters, terms, state):
            return linear_recurrence(config, parameters, state, terms[0], terms[1:], documents())

        return _with_gradients(functools.partial(attend, (jnp.float32(scale), bonus)), terms, state)

    return run(narrow, state), run(wide, state)


def of_bytes(gate):
    """A recurrence of 4,096 tokens in bfloat16, its arrays, and the bytes of these and the output.

    The decays have `gate` axes after the batch, as in `program`.
    """
    shape = (2, 4096, 8, 128)
    arrays = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    attend = effattn.retention
    if gate is not None:
        arrays["log_decay"] = jax.ShapeDtypeStruct(shape[: gate + 1], jnp.bfloat16)
        attend = effattn.gated_linear_attention
    return attend, arrays, sum(x.size * 2 for x in arrays.values()), 2 * arrays["value"].size


def assert_alike(narrow, wide):
    """Checks results of 16-bit inputs: sums agree, and nearly all rounded numbers are equal.

    A float32 sum that differs in its last bit may be rounded to a neighbour.
    """
    for ours, expected in zip(*map(jax.tree.leaves, (narrow, wide)), strict=True):
        rounding = float(jnp.finfo(ours.dtype).eps)
        expected = np.asarray(expected.astype(ours.dtype), np.float32)
        ours = np.asarray(ours, np.float32)
        np.testing.assert_allclose(ours, expected, rtol=4 * rounding, atol=1e-6)
        if rounding > 1e-4:
            assert np.mean(ours != expected) < 0.01


def program(dtype, gate, sizes, name, delta=False):
    """A function of packed documents with its gradient, for lowering, and the shapes it takes.

    The decays have `gate` axes after the batch: 2 for one decay a token, 3 for one decay a feature,
    and None for no decay. With `delta`, the function is the delta rule.
    """
    of = jax.ShapeDtypeStruct
    arrays = {
        "query": of((2, 1000, 4, sizes[0]), dtype),
        "key": of((2, 1000, 2, sizes[0]), dtype),
        "value": of((2, 1000, 2, sizes[1]), dtype),
    }
    attend = functools.partial(effattn.linear_attention, is_causal=True)
    if gate is not None:
        arrays["log_decay"] = of((2, 1000, 2, sizes[0])[: gate + 1], jnp.float32)
        attend = effattn.gated_linear_attention
    if delta:
        arrays["beta"] = of((2, 1000, 2), dtype)
        attend = effattn.delta_rule_attention

    def loss(arrays, ids):
        out, state = attend(**arrays, segment_ids=ids, return_state=True, implementation=name)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(state)

    return jax.value_and_grad(loss), arrays, of((2, 1000), jnp.int32)
