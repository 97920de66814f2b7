"""Linear attention against its O(T S) definition, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from effattn.cores.feature_maps import FEATURE_MAPS
from effattn.functional.linear import linear_attention
from tests.laws.sharding import BY_HEAD, BY_ROW, collectives, mesh
from tests.marks import slow


def direct(query, key, value, *, phi, normalize, scale=None, allowed=True):
    """The definition over all pairs; `allowed (*B, T, S)` bool."""
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
    dtype = jnp.result_type(float)
    return tuple(rng.normal(size=(*batch, *shape)).astype(dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, args):
    """The output, and the gradients of all arguments for one random cotangent."""
    out, pull_back = jax.vjp(function, *args)
    cotangent = np.random.default_rng(1).normal(size=out.shape)
    return out, pull_back(jnp.asarray(cotangent, out.dtype))


def assert_close(got, expected, rtol=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=1))


def same_document(query_ids, key_ids):
    query_ids, key_ids = np.array(query_ids), np.array(key_ids)
    return (query_ids[..., :, None] == key_ids[..., None, :]) & (key_ids[..., None, :] != 0)


@pytest.mark.parametrize(
    "name, normalize, is_causal",
    [
        slow("elu", None, False),
        ("elu", None, True),
        slow("relu", None, True),
        ("identity", None, False),
        slow("identity", None, True),
        slow("elu", False, True),
        slow("exp", None, True),
        slow("squared_relu", None, False),
        ("taylor", None, True),
    ],
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
                    allowed=np.tri(7, dtype=bool) if is_causal else np.ones((7, 5), bool),
                ),
                args,
            ),
        )


def test_a_callable_map_may_have_any_number_of_features_and_parameters():
    with jax.enable_x64(True):
        kernel = np.random.default_rng(2).normal(size=(3, 8))

        def ours(kernel, *args):
            return linear_attention(
                *args, feature_map=lambda x: jnp.exp(x @ kernel), is_causal=True
            )

        def expected(kernel, *args):
            def phi(x):
                return jnp.exp(x @ kernel)

            return direct(*args, phi=phi, normalize=True, allowed=np.tri(7, dtype=bool))

        args = (kernel, *draw(7))
        assert_close(with_gradients(ours, args), with_gradients(expected, args))


def test_scale_multiplies_and_cancels():
    with jax.enable_x64(True):
        args = draw(5)
        sums = jax.jit(functools.partial(linear_attention, normalize=False))
        means = jax.jit(linear_attention)
        unscaled = np.asarray(sums(*args, scale=1.0))
        assert_close(sums(*args, scale=3.0), 3 * unscaled)
        assert_close(sums(*args), 3**-0.5 * unscaled)
        assert_close(means(*args, scale=3.0), means(*args))


IDS = [[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [7, 7, 4, 4, 4, 4, 4, 4, 9, 9]]


def test_documents_of_queries_and_keys_may_differ_and_give_the_same_bits_twice():
    query_ids, key_ids = [[2, 2, 1, 1, 1, 5], [0, 1, 1, 3, 0, 0]], [[1, 2, 2, 2], [1, 3, 3, 0]]
    ours = functools.partial(linear_attention, segment_ids=(np.array(query_ids), np.array(key_ids)))
    allowed = same_document(query_ids, key_ids)
    expected = functools.partial(direct, phi=FEATURE_MAPS["elu"], normalize=True, allowed=allowed)
    with jax.enable_x64(True):
        args = draw(6, 4)
        got = with_gradients(ours, args)
        assert_close(got, with_gradients(expected, args))
        jax.tree.map(np.testing.assert_array_equal, got, with_gradients(ours, args))


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_similarity_at_all_gives_zeros(is_causal):
    query, key, value = draw(5)
    args = (-np.abs(query), key, value)
    run = functools.partial(linear_attention, feature_map="relu", is_causal=is_causal)
    for leaf in jax.tree.leaves(with_gradients(run, args)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("is_causal, batch, length", [(True, 0, 5), (False, 0, 5), (False, 2, 0)])
def test_there_may_be_no_examples_and_no_queries(is_causal, batch, length):
    query, key, value = (np.zeros((batch, n, 4, 3), np.float32) for n in (length, 5, 5))
    out = linear_attention(query, key, value, is_causal=is_causal)
    assert out.shape == (batch, length, 4, 3)


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_extremes_are_finite(is_causal):
    """Features overflow or underflow, or their products do although the features do not."""
    query, key, value = draw(5)
    run = functools.partial(linear_attention, is_causal=is_causal)
    for size in (1e4, -1e4, -90.0, -43.0):
        args = (np.abs(query) * np.float32(size), np.full_like(key, size), value)
        for leaf in jax.tree.leaves(with_gradients(run, args)):
            assert np.isfinite(leaf).all()


@pytest.mark.parametrize("is_causal, normalize", [(True, True), (False, True), slow(True, False)])
def test_a_state_continues_where_it_was_taken(is_causal, normalize):
    """A causal state continues with later tokens, and a bidirectional state with more keys."""
    run = jax.jit(
        functools.partial(
            linear_attention, normalize=normalize, is_causal=is_causal, return_state=True
        )
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


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_the_returned_state_is_the_one_after_the_last_valid_token(is_causal):
    run = jax.jit(functools.partial(linear_attention, is_causal=is_causal, return_state=True))
    with jax.enable_x64(True):
        args = draw(7)
        _, state = run(*args, key_value_seq_lengths=np.array([3, 7]))
        state = np.asarray(state)
        for row, length in enumerate([3, 7]):
            _, alone = run(*(x[row, :length] for x in args))
            assert_close(state[row], alone)


def test_the_initial_state_is_of_the_first_document_and_the_returned_of_the_last():
    attend = jax.jit(
        functools.partial(linear_attention, is_causal=True, return_state=True, chunk_size=2)
    )

    def run(*args, **options):
        return jax.tree.map(np.asarray, attend(*args, **options))

    with jax.enable_x64(True):
        query, key, value = (x[0] for x in draw(10))
        initial = np.random.default_rng(3).uniform(size=(2, 3, 6))
        ids = np.array([0, 1, 1, 1, 1, 2, 2, 0, 0, 0])
        out, state = run(query, key, value, initial_state=initial, segment_ids=ids)
        first, _ = run(query[1:5], key[1:5], value[1:5], initial_state=initial)
        second, last = run(query[5:7], key[5:7], value[5:7])
        zeros = np.zeros_like(out[:1])
        assert_close(out, np.concatenate([zeros, first, second, np.tile(zeros, (3, 1, 1))]))
        assert_close(state, last)

        nothing = {"key_value_seq_lengths": np.array(0)}
        _, same = run(query, key, value, initial_state=initial, **nothing)
        assert_close(same, initial)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_to_attend_to_and_nothing_to_do(is_causal):
    query, key, value = draw(0 if is_causal else 3, 0)
    ids = (np.ones(query.shape[:2], int), np.ones((2, 0), int))
    attend = functools.partial(linear_attention, is_causal=is_causal)
    out, state = jax.jit(functools.partial(attend, return_state=True))(query, key, value)
    packed = jax.jit(attend)(query, key, value, segment_ids=ids[0] if is_causal else ids)
    for result in (out, packed, state):
        np.testing.assert_array_equal(result, 0)
    assert out.shape == packed.shape == (2, 0 if is_causal else 3, 4, 5)
    assert state.shape == (2, 2, 3, 6)


@pytest.mark.parametrize("name, is_causal", [("elu", True), slow("identity", False)])
def test_bfloat16_rounds_once(name, is_causal):
    allowed = np.tri(64, dtype=bool) if is_causal else np.ones((64, 64), bool)
    args = tuple(x.astype(jnp.bfloat16) for x in draw(64, size=16, value_size=16))
    ours = functools.partial(linear_attention, feature_map=name, is_causal=is_causal)
    plain = functools.partial(
        direct, phi=FEATURE_MAPS[name], normalize=name == "elu", allowed=allowed
    )
    got = with_gradients(ours, args)
    with jax.enable_x64(True):
        expected = with_gradients(plain, tuple(np.asarray(x, np.float64) for x in args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.asarray(a, np.float64) - np.asarray(b)
        assert np.sqrt((error**2).mean() / np.square(np.asarray(b)).mean()) < 0.005


def test_a_packed_bidirectional_call_makes_no_array_of_queries_by_keys():
    def loss(query, key, value, ids):
        return (linear_attention(query, key, value, segment_ids=ids) ** 2).sum()

    length = 4096
    args = draw(length, batch=(), heads=1, key_heads=1, size=16, value_size=16)
    ids = np.arange(length) // 100 + 1
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length / 2


@pytest.mark.slow
@pytest.mark.devices
def test_sharding_adds_no_collective_and_changes_nothing():
    """Packed bidirectional calls and a shared key head, which the sharding law leaves out."""
    ids = np.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [3, 3, 4, 4, 4, 4, 4, 4, 4]])
    arrays = draw(9, heads=8, key_heads=4)
    devices = mesh(rows=2)
    by_head, by_row = (NamedSharding(devices, s) for s in (BY_HEAD, BY_ROW))

    def packed(*arrays):
        return linear_attention(*arrays, segment_ids=ids)

    placed = [jax.device_put(x, by_head) for x in arrays]
    shardings = by_head, (by_head,) * 3
    run = jax.jit(lambda args: with_gradients(packed, args), out_shardings=shardings)
    compiled = run.lower(placed).compile()
    assert collectives(compiled) == []
    assert_close(compiled(placed), with_gradients(packed, arrays), 1e-5)

    query, key, value = arrays
    shared = query, key[:, :, :1], value[:, :, :1]
    causal = functools.partial(linear_attention, is_causal=True)
    mapped = jax.shard_map(
        causal, mesh=devices, in_specs=(BY_HEAD, BY_ROW, BY_ROW), out_specs=BY_HEAD
    )
    assert_close(with_gradients(mapped, shared), with_gradients(causal, shared), 1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"feature_map": "tanh"}, "unknown feature_map 'tanh'"),
        ({"feature_map": lambda x: x[..., 0]}, r"feature_map must map \(\.\.\., H\)"),
        ({"chunk_size": 0}, "chunk_size must be None or an int"),
        ({"chunk_size": 2.5}, "chunk_size must be None or an int"),
        ({"scale": jnp.ones(3)}, "scale must be a number or an array of shape"),
        ({"initial_state": jnp.zeros((2, 2, 3, 5))}, r"initial_state must .*\(2, 2, 3, 6\)"),
        ({"initial_state": jnp.zeros((2, 2, 3, 6), int)}, "initial_state must be floating point"),
        ({"key_value_seq_lengths": jnp.zeros(3, int)}, "key_value_seq_lengths must be"),
        ({"query_seq_lengths": jnp.zeros(2)}, "query_seq_lengths must be"),
        ({"segment_ids": jnp.ones((2, 4), int)}, "segment_ids of the query must be"),
        (
            {"segment_ids": (jnp.ones((2, 5), int),) * 2, "is_causal": True},
            "segment_ids must be one array",
        ),
        ({"segment_ids": jnp.ones((2, 5), int), "return_state": True}, "need is_causal=True"),
        ({"implementation": "cuda"}, "unknown implementation 'cuda'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*draw(5), **options)


def test_causality_needs_as_many_queries_as_keys():
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 5"):
        linear_attention(*draw(4, 5), is_causal=True)


@pytest.mark.parametrize("name", ["pallas", ("triton", "mosaic_gpu"), "cudnn"])
def test_other_implementations_say_who_takes_it(name):
    with pytest.raises(NotImplementedError, match="'xla'"):
        linear_attention(*draw(5), implementation=name)


def test_implementations_are_tried_in_order():
    args = draw(5)
    got = jax.jit(functools.partial(linear_attention, implementation=("pallas", "xla")))(*args)
    np.testing.assert_array_equal(got, jax.jit(linear_attention)(*args))


@pytest.mark.parametrize("implementation", ["xla", "naive"])
def test_small_features_keep_their_digits(implementation):
    query = key = jnp.full((1, 4, 1, 2), -20, jnp.float32)
    value = jnp.arange(4, dtype=jnp.float32).reshape(1, 4, 1, 1)
    out = linear_attention(query, key, value, is_causal=True, implementation=implementation)
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 1, 1.5], atol=1e-6)
