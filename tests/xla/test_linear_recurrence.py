"""The chunked recurrence against the recurrence one token at a time, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import rwkv6_attention
from effattn.cores.documents import packed
from effattn.cores.linear_recurrence import linear_recurrence
from effattn.interfaces.linear_recurrence import Config, Terms, Tokens, normalize
from effattn.xla.linear_sum import linear_sum
from tests.marks import slow

ALL = Tokens()


@jax.jit
def walk(state, bonus, inputs):
    """The recurrence over tokens, compiled once for all decays and forms of a shape."""

    def step(state, token):
        q, k, v, d, c, a, b, read, write, start = token
        state = jnp.where(start[:, None, None, None], 0, state)
        written = k[..., :, None] * v[..., None, :]
        found = jnp.einsum("bnf,bnfd->bnd", b, state)
        decayed = d[..., None] * c[..., None, :] * state
        after = decayed - a[..., None] * found[..., None, :] + written
        after = jnp.where(write[:, None, None, None], after, state)
        if bonus is not None:
            written = jnp.where(write[:, None, None, None], written, 0)
            seen = state + bonus[..., None] * written
        else:
            seen = after
        out = jnp.einsum("bnf,bnfd->bnd", q, seen)
        return after, jnp.where(read[:, None, None], out, 0)

    return jax.lax.scan(step, state, inputs)


def token_by_token(terms, state, tokens=ALL, normalized=False):
    """The formulas of the core's docstring, token by token, for terms `(B, L, heads, ...)`."""
    query, key, value, log_decay, bonus, removed, recalled, least, of_values = terms
    heads = max(query.shape[-2], value.shape[-2])
    if normalized:
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)
    value_heads, shape = value.shape[-2], key.shape[:-2]

    def of_heads(x):
        return jnp.moveaxis(jnp.repeat(x, heads // x.shape[-2], -2), 1, 0)

    if log_decay is None:
        decay = jnp.ones((*shape, 1, 1))
    elif log_decay.ndim < 4:
        decay = jnp.broadcast_to(jnp.exp(log_decay), (*shape, value_heads))[..., None]
    else:
        decay = jnp.exp(log_decay)
    decay = jnp.broadcast_to(decay, (*decay.shape[:-1], key.shape[-1]))
    nothing = jnp.zeros_like(key)
    if recalled is None:
        removed = recalled = nothing
    elif removed is None:
        removed = key
    columns = jnp.ones_like(value) if of_values is None else jnp.exp(of_values)
    yes = jnp.ones(shape, bool)
    reads, writes, starts = (
        jnp.moveaxis(yes if x is None else x, 1, 0)
        for x in (tokens.query_mask, tokens.key_mask, tokens.starts)
    )
    starts = starts if tokens.starts is not None else ~starts

    of_tokens = query, key, value, decay, columns, removed, recalled
    inputs = (*map(of_heads, of_tokens), reads, writes, starts)
    if bonus is not None:
        bonus = jnp.repeat(bonus, heads // len(bonus), 0)
    state, output = walk(jnp.repeat(state, heads // value_heads, 1), bonus, inputs)
    if normalized:
        normaliser = output[..., -1:]
        if least is not None:
            least = jnp.moveaxis(jnp.repeat(least, heads // value_heads, -1), 1, 0)
            normaliser = jnp.maximum(jnp.abs(normaliser), least[..., None])
        empty = normaliser == 0
        output = jnp.where(empty, 0, output[..., :-1]) / jnp.where(empty, 1, normaliser)
    return jnp.moveaxis(output, 0, 1), state[:, :: heads // value_heads]


DECAYS = ("none", "head", "token", "feature")
FORMS = ("plain", "bonus", "delta", "own")


def draw_terms(
    length, decay="none", form="plain", heads=4, key_heads=2, value_heads=2, batch=2, seed=0
):
    """Terms with 3 features and 5 values."""
    rng = np.random.default_rng(seed)

    def draw_shared(*shape, low=0.1):
        return rng.uniform(low, 1, shape).astype(jnp.result_type(float))

    def draw(*shape, low=0.1):
        return draw_shared(batch, length, *shape, low=low)

    log_decay = {
        "none": None,
        "head": -draw_shared(value_heads),
        "token": -draw(value_heads),
        "feature": -draw(key_heads, 3),
    }[decay]
    return Terms(
        draw(heads, 3),
        draw(key_heads, 3),
        draw(value_heads, 5, low=-0.5),
        log_decay,
        draw_shared(key_heads, 3) if form == "bonus" else None,
        draw(key_heads, 3) / 2 if form == "own" else None,
        draw(key_heads, 3) / 2 if form in ("delta", "own") else None,
    )


def draw_state(terms, normalized=False, seed=3):
    rng = np.random.default_rng(seed)
    *_, value_heads, size = terms.value.shape
    shape = (len(terms.key), value_heads, terms.key.shape[-1], size + normalized)
    return rng.uniform(0.1, 1, shape).astype(jnp.result_type(float))


def as_they_are(parameters, queries, keys):
    """Terms exactly as the core received them."""
    terms = Terms(queries, *keys)
    return terms._replace(**{k: v for k, v in parameters.items() if v is not None})


def recurrence(terms, state, tokens=ALL, normalized=False, chunk=64, attend=linear_recurrence):
    shared = {"bonus": terms.bonus}
    if terms.log_decay is not None and terms.log_decay.ndim == 1:
        shared["log_decay"] = terms.log_decay
        terms = terms._replace(log_decay=None)
    config = Config(as_they_are, terms.value.dtype, normalized, None, chunk)
    keys = tuple(terms._replace(bonus=None))[1:]
    return attend(config, shared, state, terms.query, keys, tokens)


def assert_same(function, reference, args, rtol=1e-12):
    """Checks values, and the gradients of every argument for random cotangents of every result."""
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype), jax.eval_shape(reference, *args)
    )

    def with_gradients(function, args, cotangents):
        results, pull_back = jax.vjp(function, *args)
        return jax.tree.leaves((results, pull_back(cotangents)))

    ours = jax.jit(functools.partial(with_gradients, function))(args, cotangents)
    for a, b in zip(ours, with_gradients(reference, args, cotangents), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=1))


def both(terms, state, tokens=ALL, normalized=False, chunk=2, compiled=jax.jit):
    ours = functools.partial(recurrence, tokens=tokens, normalized=normalized, chunk=chunk)
    expected = functools.partial(token_by_token, tokens=tokens, normalized=normalized)
    assert_same(ours, compiled(expected), (terms, state))


# With chunks of 2, 37 tokens are two blocks and a rest of two and a half chunks.
@pytest.mark.parametrize("length, normalized", [slow(1, True), slow(37, True), (37, False)])
def test_agrees_with_one_token_at_a_time(length, normalized):
    with jax.enable_x64(True):
        terms = draw_terms(length)
        both(terms, draw_state(terms, normalized), normalized=normalized)


def test_a_bounded_normaliser_agrees_with_one_token_at_a_time():
    """Some normalisers are below their bound; the bound has a gradient too."""
    with jax.enable_x64(True):
        terms = draw_terms(5, "token")
        rng = np.random.default_rng(2)
        terms = terms._replace(
            query=rng.normal(size=terms.query.shape),
            least=rng.uniform(0.1, 2, terms.value.shape[:-1]),
        )
        both(terms, draw_state(terms, True), normalized=True)


@pytest.mark.parametrize("heads", [slow((4, 2, 2)), (2, 2, 4)])
def test_decays_of_values_agree_with_one_token_at_a_time(heads):
    """With documents, masks, a token that clears some columns, and chunks that are not whole."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        masks = Tokens(rng.random((2, 32)) < 0.8, rng.random((2, 32)) < 0.8)
        terms = draw_terms(32, "none", "plain", *heads)
        decays = -rng.uniform(0.1, 1, terms.value.shape)
        decays[:, 9, :, ::2] = -np.inf
        terms = terms._replace(value_log_decay=decays)
        both(terms, draw_state(terms), jax.jit(packed)(np.array(PACKED), masks), chunk=6)


SHARE_A_KEY_HEAD = ("head", "plain"), ("token", "delta"), ("none", "own")
PACKED = [[1] * 3 + [2] * 17 + [5] * 12, [0] * 2 + [7] * 14 + [3] + [4] * 9 + [0] * 6]


@pytest.mark.parametrize(
    "decay, form",
    [
        case if case == ("feature", "bonus") else slow(*case)
        for case in itertools.product(DECAYS, FORMS)
    ],
)
def test_every_decay_in_every_form(decay, form):
    """Chunks of 6, which is no power of two, with documents and masks.

    In some cases the values of several heads share a key head, and in the others queries do. The
    last chunk is not whole.
    """
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        masks = Tokens(rng.random((2, 32)) < 0.8, rng.random((2, 32)) < 0.8)
        heads = (2, 2, 4) if (decay, form) in SHARE_A_KEY_HEAD else (4, 2, 2)
        terms = draw_terms(32, decay, form, *heads)
        tokens = jax.jit(packed)(np.array(PACKED), masks)
        # Only the common parts of the reference are compiled, because all cases share these.
        both(terms, draw_state(terms), tokens, chunk=6, compiled=lambda function: function)


def test_gradients_of_decays_that_queries_share_in_float32():
    """jaxlib 0.10.2 ends the process if this program has one axis more: see `mapped`."""
    terms = draw_terms(32, "token")
    run = functools.partial(recurrence, chunk=16)
    assert_same(run, jax.jit(token_by_token), (terms, draw_state(terms)), rtol=2e-5)


@pytest.mark.slow
def test_chunks_of_a_power_of_two_with_a_decay_of_the_head():
    with jax.enable_x64(True):
        terms = draw_terms(20, "head", "delta")
        both(terms, draw_state(terms), chunk=4)


def test_strong_decays_lose_no_digit():
    """Sums are local: tokens after a decay of exp(-1e4) are as exact as at the start."""
    terms, run = draw_terms(64, "feature"), jax.jit(recurrence)
    strong = terms.log_decay.copy()
    strong[:, 20] = -1e4
    out, _ = run(terms._replace(log_decay=strong), draw_state(terms))
    first = jax.tree.map(lambda x: np.roll(x, -20, axis=1), terms)
    alone, _ = run(first, np.zeros_like(draw_state(terms)))
    np.testing.assert_allclose(out[:, 20:], alone[:, :44], rtol=2e-6, atol=2e-7)


@pytest.mark.slow
def test_a_decay_alike_over_features_is_a_decay_of_the_token():
    with jax.enable_x64(True):
        terms = draw_terms(40, "token")
        alike = np.broadcast_to(terms.log_decay[..., None], terms.key.shape)
        state, run = draw_state(terms), jax.jit(recurrence)
        for a, b in zip(
            run(terms, state), run(terms._replace(log_decay=alike), state), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_length_zero_gives_the_state_back():
    terms = draw_terms(0)
    state = draw_state(terms)
    output, after = recurrence(terms, state)
    assert output.shape == (2, 0, 4, 5)
    np.testing.assert_array_equal(after, state)


def test_packed_padding_belongs_to_the_document_before():
    ids = np.array([[0, 1, 1, 0, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0], [3, 3, 4, 4, 5, 5, 5]])
    valid = np.arange(7) < np.array([[7], [7], [3]])
    tokens = jax.jit(packed)(ids, Tokens(None, valid))
    np.testing.assert_array_equal(
        tokens.starts, [[0, 0, 0, 0, 1, 0, 0], [0] * 7, [0, 0, 1, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        tokens.key_mask, [[0, 1, 1, 0, 1, 0, 0], [0] * 7, [1, 1, 1, 0, 0, 0, 0]]
    )
    # The last document has no valid key, so its queries read nothing.
    np.testing.assert_array_equal(
        tokens.query_mask, [[0, 1, 1, 0, 1, 0, 0], [0] * 7, [1, 1, 1, 1, 0, 0, 0]]
    )


def test_sum_is_the_recurrence_read_at_its_end():
    with jax.enable_x64(True):
        terms = draw_terms(7)
        state = draw_state(terms, normalized=True)

        def expected(terms, state):
            _, state = recurrence(terms, state, normalized=True)
            # A key of zeros adds nothing: the second call reads the sum over the first call.
            again = terms._replace(key=0 * terms.key, value=0 * terms.value)
            return recurrence(again, state, normalized=True)[0], state

        ours = functools.partial(recurrence, normalized=True, attend=linear_sum)
        assert_same(ours, jax.jit(expected), (terms, state))


def test_normalize_divides_by_the_last_entry_once():
    x = np.float32([[6.0, 2.0], [3.0, 0.0], [1e-30, 1e-25], [2.0, 1e-45]])

    @jax.jit
    def with_gradient(x):
        y, pull_back = jax.vjp(normalize, x)
        return y, *pull_back(jnp.ones_like(y))

    y, gradient = with_gradient(x)
    np.testing.assert_allclose(y, [[3], [0], [1e-5], [0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, -1.5], [0, 0], [1e25, -1e20], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("decay, form", [("none", "plain"), slow("feature", "own")])
def test_the_future_changes_no_bit_of_the_past(decay, form):
    terms = draw_terms(37, decay, form)
    state = draw_state(terms)
    run = jax.jit(functools.partial(recurrence, chunk=4))
    before, _ = run(terms, state)
    for t in (0, 3, 4, 31, 32, 36):
        future = np.arange(37)[:, None, None] >= t
        after, _ = run(jax.tree.map(lambda x, f=future: np.where(f, x - 0.1, x), terms), state)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.array_equal(after[:, t], before[:, t])


@pytest.mark.parametrize(
    "decay, form",
    [("none", "plain"), slow("feature", "delta")],
)
def test_memory_is_linear_and_the_program_does_not_grow(decay, form):
    def run(terms, state):
        output, state = recurrence(terms, state, chunk=16)
        return (output**2).sum() + (state**2).sum()

    def compiled(length):
        terms = draw_terms(length, decay, form, 2, 2, batch=1)
        return jax.jit(jax.grad(run, argnums=(0, 1))).lower(terms, draw_state(terms)).compile()

    short, long = compiled(4096), compiled(16384)
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    assert np.log(sizes[1] / sizes[0]) / np.log(4) <= 1.1
    assert len(long.as_text()) < 1.02 * len(short.as_text())


def test_gradients_of_what_all_blocks_share_are_added_in_float32():
    """In bfloat16, the gradients of small blocks would be lost beside that of a large block."""
    ones = jnp.ones((33 * 64, 1, 1))
    value = ones.at[-64:].set(1000.0)

    def total(bonus):
        out = rwkv6_attention(ones, ones, value, log_decay=-ones, bonus=bonus, chunk_size=8)
        return out.sum()

    gradient = jax.grad(total)(jnp.ones((1, 1), jnp.bfloat16))
    np.testing.assert_allclose(np.float32(gradient), value.sum(), rtol=5e-3)
