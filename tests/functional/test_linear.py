"""Linear attention against its O(T S) definition, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.functional.feature_maps import FEATURE_MAPS
from effattn.functional.linear import linear_attention


def direct(query, key, value, *, phi, normalize, scale=None, allowed=True):
    """The definition; `allowed (*B, T, S)` bool."""
    groups = query.shape[-2] // key.shape[-2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = jnp.repeat(phi(key), groups, -2), jnp.repeat(value, groups, -2)
    weights = scale * jnp.einsum("...tnf,...snf->...nts", phi(query), key)
    weights = jnp.where(jnp.expand_dims(jnp.asarray(allowed), -3), weights, 0)
    if normalize:
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("...nts,...snd->...tnd", weights, value)


def draw(queries, keys=None, batch=(2,), heads=4, key_heads=2, size=3, value_size=5, seed=0):
    keys = queries if keys is None else keys
    rng = np.random.default_rng(seed)
    shapes = (queries, heads, size), (keys, key_heads, size), (keys, key_heads, value_size)
    return tuple(jnp.asarray(rng.normal(size=(*batch, *shape))) for shape in shapes)


def with_gradients(function, args):
    """The output, and the gradients of all arguments for one random cotangent."""

    def run(args):
        out, pull_back = jax.vjp(function, *args)
        cotangent = np.random.default_rng(1).normal(size=out.shape)
        return out, pull_back(jnp.asarray(cotangent, out.dtype))

    return jax.jit(run)(args)


def assert_close(got, expected, rtol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max(initial=1)))


def same_document(query_ids, key_ids):
    query_ids, key_ids = jnp.asarray(query_ids), jnp.asarray(key_ids)
    return (query_ids[..., :, None] == key_ids[..., None, :]) & (key_ids[..., None, :] != 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "name, normalize", [("elu", None), ("relu", None), ("identity", None), ("elu", False)]
)
def test_is_its_definition(name, normalize, is_causal):
    normalized = name != "identity" if normalize is None else normalize
    with jax.enable_x64(True):
        args = draw(7, 7 if is_causal else 5)
        assert_close(
            with_gradients(
                functools.partial(
                    linear_attention, feature_map=name, normalize=normalize, is_causal=is_causal
                ),
                args,
            ),
            with_gradients(
                functools.partial(
                    direct,
                    phi=FEATURE_MAPS[name],
                    normalize=normalized,
                    allowed=jnp.tri(7, dtype=bool) if is_causal else jnp.ones((7, 5), bool),
                ),
                args,
            ),
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_callable_map_may_have_any_number_of_features_and_parameters(is_causal):
    allowed = jnp.tri(7, dtype=bool) if is_causal else jnp.ones((7, 7), bool)
    with jax.enable_x64(True):
        kernel = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8)))

        def ours(kernel, *args):
            def phi(x):
                return jnp.exp(x @ kernel)

            return linear_attention(*args, feature_map=phi, is_causal=is_causal)

        def expected(kernel, *args):
            return direct(*args, phi=lambda x: jnp.exp(x @ kernel), normalize=True, allowed=allowed)

        args = (kernel, *draw(7))
        assert_close(with_gradients(ours, args), with_gradients(expected, args))


@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_multiplies_and_cancels(is_causal):
    with jax.enable_x64(True):
        args = draw(5)
        run = functools.partial(linear_attention, *args, is_causal=is_causal)
        unscaled = run(normalize=False, scale=1.0)
        assert_close(run(normalize=False, scale=jnp.asarray(3.0)), 3 * unscaled)
        assert_close(run(normalize=False), 3**-0.5 * unscaled)
        assert_close(run(scale=3.0), run())


IDS = [[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [7, 7, 4, 4, 4, 4, 4, 4, 9, 9]]


@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_attend_inside_their_document(is_causal):
    allowed = same_document(IDS, IDS)
    if is_causal:
        allowed &= jnp.tri(10, dtype=bool)
    ours = functools.partial(
        linear_attention, segment_ids=jnp.asarray(IDS), is_causal=is_causal, chunk_size=2
    )
    expected = functools.partial(direct, phi=FEATURE_MAPS["elu"], normalize=True, allowed=allowed)
    with jax.enable_x64(True):
        args = draw(10)
        assert_close(with_gradients(ours, args), with_gradients(expected, args))


def test_documents_of_queries_and_keys_may_differ():
    query_ids, key_ids = [[2, 2, 1, 1, 1, 5], [0, 1, 1, 3, 0, 0]], [[1, 2, 2, 2], [1, 3, 3, 0]]
    ours = functools.partial(
        linear_attention, segment_ids=(jnp.asarray(query_ids), jnp.asarray(key_ids))
    )
    allowed = same_document(query_ids, key_ids)
    expected = functools.partial(direct, phi=FEATURE_MAPS["elu"], normalize=True, allowed=allowed)
    with jax.enable_x64(True):
        args = draw(6, 4)
        assert_close(with_gradients(ours, args), with_gradients(expected, args))


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_in_padding_reaches_nothing(is_causal, segments):
    query_lengths, key_lengths = jnp.asarray([5, 10]), jnp.asarray([7, 0])
    inside_query = jnp.arange(10) < query_lengths[:, None]
    inside_key = jnp.arange(10) < key_lengths[:, None]
    allowed = inside_query[:, :, None] & inside_key[:, None, :]
    if is_causal:
        allowed &= jnp.tri(10, dtype=bool)
    if segments:
        allowed &= same_document(IDS, IDS)
        inside_query &= jnp.asarray(IDS) != 0
        inside_key &= jnp.asarray(IDS) != 0

    ours = functools.partial(
        linear_attention,
        is_causal=is_causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        segment_ids=jnp.asarray(IDS) if segments else None,
    )
    expected = functools.partial(direct, phi=FEATURE_MAPS["elu"], normalize=True, allowed=allowed)
    with jax.enable_x64(True):
        args = draw(10)
        inside = (inside_query, inside_key, inside_key)
        filled = tuple(
            jnp.where(mask[..., None, None], x, jnp.nan)
            for x, mask in zip(args, inside, strict=True)
        )
        out, gradients = with_gradients(ours, filled)
        assert_close((out, gradients), with_gradients(expected, args))
        np.testing.assert_array_equal(out[~inside_query], 0)
        for gradient, mask in zip(gradients, inside, strict=True):
            np.testing.assert_array_equal(gradient[~mask], 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_similarity_at_all_gives_zeros(is_causal):
    query, key, value = draw(5)
    args = (-jnp.abs(query), key, value)
    run = functools.partial(linear_attention, feature_map="relu", is_causal=is_causal)
    for leaf in jax.tree.leaves(with_gradients(run, args)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e4, -1e4, -90.0, -43.0])
def test_extremes_are_finite(size, is_causal):
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), draw(5))
    args = (jnp.abs(args[0]) * size, jnp.full_like(args[1], size), args[2])
    for leaf in jax.tree.leaves(
        with_gradients(functools.partial(linear_attention, is_causal=is_causal), args)
    ):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_state_continues_where_it_was_taken(is_causal, normalize):
    """Causal: the tokens after; bidirectional: more keys."""
    run = functools.partial(
        linear_attention, normalize=normalize, is_causal=is_causal, return_state=True
    )
    with jax.enable_x64(True):
        query, key, value = draw(9)
        out, state = run(query, key, value)
        assert state.shape == (2, 2, 3, 5 + normalize)
        first_query = query[:, :4] if is_causal else query
        _, middle = run(first_query, key[:, :4], value[:, :4])
        later_query = query[:, 4:] if is_causal else query
        later, after = run(later_query, key[:, 4:], value[:, 4:], initial_state=middle)
        assert_close((later, after), (out[:, 4:] if is_causal else out, state))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_returned_state_is_the_one_after_the_last_valid_token(is_causal):
    lengths = jnp.asarray([3, 7])
    run = functools.partial(linear_attention, is_causal=is_causal, return_state=True)
    with jax.enable_x64(True):
        args = draw(7)
        _, state = run(*args, key_value_seq_lengths=lengths)
        for row, length in enumerate([3, 7]):
            _, alone = run(*(x[row, :length] for x in args))
            assert_close(state[row], alone)


def test_the_initial_state_is_of_the_first_document_and_the_returned_of_the_last():
    run = functools.partial(linear_attention, is_causal=True, return_state=True, chunk_size=2)
    with jax.enable_x64(True):
        query, key, value = (x[0] for x in draw(9))
        initial = jnp.asarray(np.random.default_rng(3).uniform(size=(2, 3, 6)))
        ids = jnp.asarray([0, 1, 1, 1, 2, 2, 0, 0, 0])
        out, state = run(query, key, value, initial_state=initial, segment_ids=ids)
        first, _ = run(query[1:4], key[1:4], value[1:4], initial_state=initial)
        second, last = run(query[4:6], key[4:6], value[4:6])
        zeros = jnp.zeros_like(out[:1])
        assert_close(out, jnp.concatenate([zeros, first, second, jnp.tile(zeros, (3, 1, 1))]))
        assert_close(state, last)

        same = run(
            query, key, value, initial_state=initial, key_value_seq_lengths=jnp.asarray(0)
        )[1]
        assert_close(same, initial)


def test_dtypes():
    args = draw(5)
    for dtype, state_dtype in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)):
        out, state = linear_attention(*(x.astype(dtype) for x in args), return_state=True)
        assert out.dtype == dtype and state.dtype == state_dtype
    query, key, value = args
    assert linear_attention(query, key, value.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "identity"])
def test_bfloat16_rounds_once(name, is_causal):
    allowed = jnp.tri(64, dtype=bool) if is_causal else jnp.ones((64, 64), bool)
    args = tuple(x.astype(jnp.bfloat16) for x in draw(64, size=16, value_size=16))
    got = linear_attention(*args, feature_map=name, is_causal=is_causal)
    with jax.enable_x64(True):
        expected = direct(
            *(x.astype(jnp.float64) for x in args),
            phi=FEATURE_MAPS[name],
            normalize=name == "elu",
            allowed=allowed,
        )
    error = np.asarray(got, np.float64) - np.asarray(expected)
    assert np.sqrt((error**2).mean() / np.square(expected).mean()) < 0.005


def test_vmap_over_any_argument():
    args = draw(6, batch=(3, 2))
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0], [1] * 6, [3, 3, 3, 3, 4, 4]])
    lengths = jnp.asarray([6, 4, 0])
    state = jnp.asarray(np.random.default_rng(3).uniform(size=(3, 2, 2, 3, 6)), jnp.float32)

    def run(query, key, value, ids, lengths, state):
        return linear_attention(
            query,
            key,
            value,
            is_causal=True,
            segment_ids=jnp.broadcast_to(ids, (2, 6)),
            key_value_seq_lengths=jnp.broadcast_to(lengths, (2,)),
            initial_state=state,
            return_state=True,
        )

    every = (*args, ids, lengths, state)
    for batched in range(6):
        axes = tuple(0 if i == batched else None for i in range(6))
        given = tuple(x if i == batched else x[1] for i, x in enumerate(every))
        got = jax.jit(jax.vmap(run, axes))(*given)
        for row in range(3):
            alone = jax.jit(run)(*(x[row] if i == batched else x for i, x in enumerate(given)))
            assert_close(jax.tree.map(lambda x, row=row: x[row], got), alone, rtol=1e-5)


def test_a_packed_bidirectional_call_grows_linearly():
    def temporaries(length):
        args = draw(length, batch=(1,), size=16, value_size=16)
        ids = jnp.arange(length)[None] // 100 + 1

        def loss(*args):
            return (linear_attention(*args, segment_ids=ids) ** 2).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert np.log2(temporaries(4096) / temporaries(2048)) <= 1.1


def test_twice_the_same_bits():
    ids = jnp.asarray(IDS)
    run = functools.partial(linear_attention, segment_ids=ids)
    first, second = (with_gradients(run, draw(10)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
