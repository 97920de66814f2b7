"""LSH attention: its definition, packing, padding, its limits, and the form of transformers."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import dot_product_attention, lsh_attention, lsh_rotations
from effattn.cores import sorted_runs
from effattn.functional import lsh as module
from effattn.nn import LSHSelfAttention, reformer_lsh_from_transformers
from effattn.testing.functions import assert_close
from tests.marks import slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers_reformer.npz"
LENGTH, HEADS, SIZE = 37, 2, 6
OPTIONS = {"num_rounds": 3, "num_buckets": 8, "chunk_length": 3}

# For tests that compile slowly and in which is_causal matters little.
both_ways = pytest.mark.parametrize(
    "is_causal",
    [slow(True), False],
    ids=["causal", "bidirectional"],
)


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    """Cuts a round into several pieces, of which the last has an empty tile."""
    monkeypatch.setattr(sorted_runs, "_TOKENS_AT_A_TIME", 9)


def draw(length=LENGTH, batch=(2,), dtype=np.float64, **options):
    """Query_key, value and rotations."""
    options = {**OPTIONS, **options}
    rng = np.random.default_rng(length)
    columns = sum(module.factors_of(options["num_buckets"])) // 2
    shapes = {
        "query_key": (*batch, length, HEADS, SIZE),
        "value": (*batch, length, HEADS, 5),
        "rotations": (HEADS, options["num_rounds"], SIZE, columns),
    }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def ours(arrays, given, **options):
    return lsh_attention(**arrays, **given, **{**OPTIONS, **options}, return_residual=True)


def naive(arrays, given, **options):
    return effattn.naive.lsh(**arrays, **given, **{**OPTIONS, **options}, return_residual=True)


@functools.cache
def with_gradients(function, **options):
    """`(arrays, known, weights) -> (results, gradients of query_key and value)`, compiled.

    Weights `(B, T)` choose the rows that count.
    """

    @jax.jit
    def run(arrays, known, weights):
        rest = {k: x for k, x in arrays.items() if k == "rotations"}

        def call(tokens):
            out, lse = function({**tokens, **rest}, known, **options)
            out = jnp.where(weights[..., None, None] > 0, out, 0)
            return out, jnp.where(weights[..., None] > 0, lse, 0)

        tokens = {k: x for k, x in arrays.items() if k != "rotations"}
        results, pull_back = jax.vjp(call, tokens)
        rng = np.random.default_rng(0)
        cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), results)
        return results, *pull_back(cotangents)

    return run


ALL = np.ones((2, LENGTH))


@both_ways
@pytest.mark.parametrize("num_rounds, num_buckets", [slow(3, 8), (1, 6)])
def test_it_is_its_definition(num_rounds, num_buckets, is_causal, x64):
    """Checks outputs, log-sum-exps and gradients in float64."""
    options = {"num_rounds": num_rounds, "num_buckets": num_buckets, "is_causal": is_causal}
    arrays = draw(**options)
    expected = with_gradients(naive, **options)(arrays, {}, ALL)
    assert_close(with_gradients(ours, **options)(arrays, {}, ALL), expected, 1e-11)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize(
    "sizes",
    [slow((23, 1, 2, 7)), (1,) * 9 + (16, 8)],
    ids=str,
)
def test_documents_are_sorted_and_cut_by_themselves(sizes, is_causal, x64):
    """Documents in either order, with padding after the first one and at the end."""
    arrays = draw()
    ids = np.zeros((2, LENGTH), np.int32)
    for row, in_order in enumerate((sizes, sizes[::-1])):
        start = 0
        for number, size in enumerate(in_order):
            ids[row, start : start + size] = 20 - number
            start += size + (number == 0)
    valid = ids != 0
    spoilt = arrays | {
        k: np.where(valid[..., None, None], arrays[k], np.nan) for k in ("query_key", "value")
    }
    packed = with_gradients(ours, is_causal=is_causal)(spoilt, {"segment_ids": ids}, valid)
    expected = with_gradients(naive, is_causal=is_causal)(arrays, {"segment_ids": ids}, valid)
    assert_close(packed, expected, 1e-11)


@pytest.mark.slow
@both_ways
def test_padding_is_nowhere(is_causal, x64):
    """Rows hold fewer and fewer tokens, down to none; padded rows give zeros and -inf."""
    arrays = draw(batch=(4,))
    lengths = np.array([LENGTH, 22, 1, 0], np.int32)
    valid = np.arange(LENGTH) < lengths[:, None]
    tokens = {
        k: np.where(valid[..., None, None], arrays[k], np.nan) for k in ("query_key", "value")
    }
    run = jax.jit(functools.partial(ours, is_causal=is_causal))
    given = {"key_value_seq_lengths": lengths, "query_seq_lengths": np.full_like(lengths, LENGTH)}
    out, lse = map(np.asarray, run({**arrays, **tokens}, given))
    np.testing.assert_array_equal(out[~valid], 0)
    np.testing.assert_array_equal(lse[~valid], -np.inf)
    assert_close(
        (out, lse), jax.jit(functools.partial(naive, is_causal=is_causal))(arrays, given), 1e-12
    )
    few, _ = run({**arrays, **tokens}, given | {"query_seq_lengths": lengths // 2})
    kept = (np.arange(LENGTH) < lengths[:, None] // 2)[..., None, None]
    np.testing.assert_array_equal(few, np.where(kept, out, 0))


@both_ways
@pytest.mark.parametrize("chunk_length", [LENGTH, 99])
def test_one_bucket_and_one_chunk_are_exact_attention(chunk_length, is_causal, x64):
    """Keys are normalised. A query attends to all tokens except its own, unless it is alone."""
    options = {"num_buckets": 1, "chunk_length": chunk_length, "is_causal": is_causal}
    arrays = draw(**options)
    out, _ = jax.jit(functools.partial(ours, **options))(arrays, {})
    query = arrays["query_key"]
    key = query / np.sqrt((query**2).mean(-1, keepdims=True) + 1e-6)
    mask = ~np.eye(LENGTH, dtype=bool)
    if is_causal:
        mask[0, 0] = True
    exact = functools.partial(dot_product_attention, is_causal=is_causal)
    assert_close(out, jax.jit(exact)(query, key, arrays["value"], mask=mask), 1e-12)


@pytest.mark.slow
@both_ways
def test_a_pair_counts_once_in_however_many_rounds(is_causal, x64):
    arrays = draw(num_rounds=1)
    once, *_ = with_gradients(naive, is_causal=is_causal, num_rounds=1)(arrays, {}, ALL)
    arrays["rotations"] = np.repeat(arrays["rotations"], 3, 1)
    options = {"num_rounds": 3, "num_buckets": 8, "is_causal": is_causal}
    often, *_ = with_gradients(ours, **options)(arrays, {}, ALL)
    assert_close(often, once, 1e-13)


@both_ways
def test_a_token_sees_itself_only_where_it_has_nothing_else(is_causal):
    arrays = draw(5, batch=(), dtype=np.float32, num_buckets=2)
    options = {"num_buckets": 2, "is_causal": is_causal}

    def of_values(value):
        return ours({**arrays, "value": value}, {}, **options)

    jacobian, lse = jax.jit(jax.jacrev(of_values, has_aux=True))(arrays["value"])
    alone = np.asarray(lse) == -1e5
    assert alone[0].all() == is_causal
    weights = np.einsum("tnvsnv->nts", jacobian) / 5
    own = np.einsum("ntt->tn", weights)
    np.testing.assert_array_equal(own, alone)

    single = {k: x if k == "rotations" else x[:1] for k, x in draw(1, (), num_buckets=1).items()}
    out, lse = jax.jit(functools.partial(ours, num_buckets=1, is_causal=is_causal))(single, {})
    np.testing.assert_array_equal(out, single["value"].astype(out.dtype))
    np.testing.assert_array_equal(lse, np.full((1, HEADS), -1e5))


@pytest.mark.slow
def test_causal_attention_has_no_derivative_by_later_tokens():
    """The derivative is exactly zero, although later tokens move the sorted earlier tokens."""
    arrays = draw(19, batch=(), dtype=np.float32)

    def of_tokens(query_key, value):
        tokens = {"query_key": query_key, "value": value}
        return ours({**arrays, **tokens}, {}, is_causal=True)[0].sum((1, 2))

    tokens = arrays["query_key"], arrays["value"]
    later = np.arange(19) > np.arange(19)[:, None]
    for jacobian in jax.jit(jax.jacrev(of_tokens, (0, 1)))(*tokens):
        size = np.abs(jacobian).max((2, 3))
        assert not np.any(size[later]) and np.any(size[~later])


def test_gradients_are_gathered_and_never_scattered():
    arrays = draw(dtype=np.float32)
    ids = {"segment_ids": np.ones((2, LENGTH), int)}
    for known, is_causal in (({}, False), ({}, True), (ids, False)):
        run = with_gradients(ours, is_causal=is_causal)
        text = str(jax.make_jaxpr(run)(arrays, known, ALL))
        assert "scatter-add" not in text and "scatter_add" not in text


@pytest.mark.parametrize("case", [slow("whole"), slow("factors"), "two_chunks"])
def test_it_agrees_with_transformers(case):
    """Outputs, gradients and buckets of `LSHSelfAttention` with one round (`tests/golden`).

    With more rounds, transformers does not divide by how often a pair is met, and the first chunk
    of a round sees the last chunk of the round before.
    """
    with np.load(GOLDEN) as golden:
        arrays = {k.split("/", 1)[1]: golden[k] for k in golden.files if k.startswith(f"{case}/")}
    rotations = arrays["rotations"].transpose(0, 2, 1, 3)
    factors = tuple(arrays["factors"].tolist())
    layers = {"self_attention.query_key", "self_attention.value", "output.dense"}
    mixer = reformer_lsh_from_transformers(
        {f"{n}.weight": arrays[f"parameter/{n.split('.')[1]}.weight"] for n in layers},
        num_heads=4,
        num_buckets=factors if len(factors) > 1 else factors[0],
        chunk_length=6,
        is_causal=False,
        rotations=rotations,
    )

    @jax.jit
    def with_gradient(x):
        buckets = module.hashed(mixer.query_key(x), rotations, factors)
        y, pull_back = jax.vjp(mixer, x)
        return buckets, y, *pull_back(arrays["cotangent"])

    buckets, y, gradient = with_gradient(arrays["x"])
    np.testing.assert_array_equal(np.moveaxis(buckets, 1, -1), arrays["buckets"])
    np.testing.assert_allclose(y, arrays["output"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(gradient, arrays["gradient"], rtol=1e-4, atol=1e-4)


def test_rotations_are_drawn_from_rng():
    arrays, rng = draw(dtype=np.float32, num_rounds=1), jax.random.key(3)
    arrays["rotations"] = lsh_rotations(rng, 1, 8, SIZE, num_heads=HEADS)
    assert arrays["rotations"].shape == (HEADS, 1, SIZE, 3)

    @jax.jit
    def both(arrays, rng):
        tokens = {k: arrays[k] for k in ("query_key", "value")}
        return ours(arrays, {}, num_rounds=1), ours(tokens, {"rng": rng}, num_rounds=1)

    expected, drawn = both(arrays, rng)
    jax.tree.map(np.testing.assert_array_equal, drawn, expected)


@pytest.mark.parametrize(
    "num_buckets, factors",
    [
        (1, ()),
        (2, (2,)),
        (6, (6,)),
        (8, (2, 4)),
        (256, (16, 16)),
        (24, (4, 6)),
        ([4, 2, 2], (4, 2, 2)),
    ],
)
def test_buckets_are_hashed_by_even_factors(num_buckets, factors):
    assert module.factors_of(num_buckets) == factors


def test_a_mixer_trains_no_rotations_and_takes_short_sequences():
    mixer = nnx.eval_shape(lambda: LSHSelfAttention(8, 2, rngs=nnx.Rngs(0)))
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(mixer, nnx.Param))]
    assert sorted(paths) == ["out.kernel", "query_key.kernel", "value.kernel"]
    y = nnx.eval_shape(lambda mixer: mixer(jnp.ones((1, 3, 8))), mixer)
    assert y.shape == (1, 3, 8)


@pytest.mark.slow
def test_many_tokens_extend_a_state_as_few_do():
    """`extend` sorts many tokens, but compares each of a few tokens with all stored tokens."""
    options = {"num_rounds": 2, "num_buckets": 4, "chunk_length": 2}
    mixer = nnx.jit(lambda: LSHSelfAttention(8, 2, **options, rngs=nnx.Rngs(0)))()
    x = np.random.default_rng(0).normal(size=(2, 30, 8)).astype(np.float32)
    whole = nnx.jit(lambda mixer, x: mixer(x))(mixer, x)
    extend = nnx.jit(lambda x, state: mixer.extend(x, state))
    state, parts, start = mixer.init_state(2, 33), [], 0
    for size in (3, 12, 3, 12):
        y, state = extend(x[:, start : start + size], state)
        parts.append(y)
        start += size
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_buckets_are_kept_as_integers():
    """Integers keep the hashes of a 16-bit cache equal to those of the tokens."""

    def tokens():
        options = {"num_rounds": 2, "num_buckets": 4, "chunk_length": 2}
        mixer = LSHSelfAttention(8, 2, **options, rngs=nnx.Rngs(0))
        return mixer.init_state(1, 5, jnp.bfloat16).tokens

    query_key, value, buckets = jax.eval_shape(tokens)
    assert query_key.dtype == value.dtype == jnp.bfloat16 and buckets.dtype == jnp.int32


def test_nothing_gives_nothing():
    arrays = draw(0, dtype=np.float32, num_buckets=1)
    out, lse = jax.jit(functools.partial(ours, num_buckets=1))(arrays, {})
    assert out.shape == (2, 0, HEADS, 5) and lse.shape == (2, 0, HEADS)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_rounds": 0}, "num_rounds must be an int, 1 or more, got 0"),
        ({"num_buckets": 7}, "num_buckets must be 1, an even int or a tuple .* got 7"),
        ({"num_buckets": (4, 3)}, r"num_buckets must be 1, .* got \(4, 3\)"),
        (
            {"num_buckets": 64},
            "num_buckets must be at most 37, the number of tokens, got 64; pass fewer",
        ),
        ({"chunk_length": 0}, "chunk_length must be an int, 1 or more tokens, got 0"),
        ({"rng": jax.random.key(0)}, "needs rng, .* or rotations, got both"),
        ({"rotations": None}, "needs rng, .* or rotations, got neither"),
        ({"num_rounds": 2}, r"rotations must be floating point of shape \(2, 2, 6, 3\), got"),
        ({"value": np.ones((2, LENGTH, 3, 5), np.float32)}, "value must have the length and heads"),
        ({"segment_ids": (np.ones((2, LENGTH), int),) * 2}, "segment_ids must be one array"),
        ({"segment_ids": np.ones((2, 3), int)}, r"must be integers of shape \(2, 37\)"),
        ({"key_value_seq_lengths": np.ones(3, int)}, r"must be integers of shape \(2,\)"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    arguments = {**draw(dtype=np.float32), **OPTIONS, **given}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: lsh_attention(**arguments))


def test_rotations_of_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="num_rounds must be an int, 1 or more, got 2.5"):
        lsh_rotations(jax.random.key(0), 2.5, 4, 6)
