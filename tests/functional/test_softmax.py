"""Differences and common results of `dot_product_attention` and `jax.nn.dot_product_attention`."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dot_product_attention, sliding_window_attention
from effattn.analysis import cost
from effattn.testing.functions import assert_close
from effattn.xla import walks
from tests.dense import cotangents, dense_with_gradients, draw, with_gradients
from tests.marks import slow, slow_but_for

TILE = (4, 5)
rng = np.random.default_rng(0)


def attend(arrays, known, **options):
    options = {"tile": TILE, **options}
    return dot_product_attention(**arrays, **known, **options, return_residual=True)


# Equality with jax.nn


IN_TILES = ("bias and mask of heads", "causal window")
LENGTHS = {"query_seq_lengths": np.int32([11, 6]), "key_value_seq_lengths": np.int32([9, 14])}
MASK = rng.random((2, 4, 11, 14)) < 0.7
BIAS = rng.normal(size=(2, 4, 11, 14)).astype(np.float32)

JAX_NN = {
    "nothing": ({}, {}, {}),
    "grouped, causal": ({"key_heads": 2}, {}, {"is_causal": True}),
    "one key head, mask": ({"key_heads": 1}, {"mask": MASK[:, :1]}, {"scale": 0.3}),
    "bias and mask of heads": ({}, {"bias": BIAS[:1], "mask": MASK[:1]}, {"is_causal": True}),
    "bias and mask of keys": ({}, {"bias": BIAS[:, :1, :1], "mask": MASK[:, :1, :1]}, {}),
    "lengths": ({}, LENGTHS, {"is_causal": True}),
    "window": ({}, {}, {"local_window_size": 3}),
    "window, lengths": ({}, LENGTHS, {"local_window_size": (2, 1), "scale": 2}),
    "causal window": ({}, {}, {"local_window_size": (4, 3), "is_causal": True}),
    "no batch": ({"batch": ()}, {"bias": BIAS[0], "mask": MASK[0]}, {}),
    "no batch, lengths": ({"batch": ()}, {k: v[:1] for k, v in LENGTHS.items()}, {}),
}
QUICK = (*IN_TILES, "grouped, causal", "one key head, mask", "window, lengths", "no batch")


@pytest.mark.parametrize("case", slow_but_for(QUICK, JAX_NN))
def test_gives_the_numbers_of_jax_nn(case):
    shape, given, options = JAX_NN[case]
    arrays = draw(**{"key_heads": 4, **shape}, value_size=3, dtype=np.float32)
    if "bias" in given:
        arrays["bias"] = given["bias"]
    known = {name: array for name, array in given.items() if name != "bias"}

    # In an empty row, jax.nn gives a mean of the values; its gradient is left out here.
    _, lse = effattn.naive.softmax(**arrays, **known, **options, return_residual=True)
    met = np.asarray(lse != -np.inf)
    d_out = cotangents(arrays)[0] * met[..., None]

    def both(function):
        @jax.jit
        def program(arrays, known):
            out, pull_back, lse = jax.vjp(
                lambda a: function(**a, **known, **options, return_residual=True),
                arrays,
                has_aux=True,
            )
            return out, lse, pull_back(d_out)[0]

        return program(arrays, known)

    tile = TILE if case in IN_TILES else None
    out, lse, gradients = both(functools.partial(dot_product_attention, tile=tile))
    expected_out, expected_lse, expected_gradients = both(jax.nn.dot_product_attention)
    assert_close(out, jnp.where(met[..., None], expected_out, 0), 5e-6)
    assert_close(lse, jnp.where(met, expected_lse, -jnp.inf), 5e-6)
    assert_close(gradients, expected_gradients, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_half_precision_is_as_near_the_truth_as_the_definition(dtype, x64):
    halves = {k: a.astype(dtype) for k, a in draw(30, 30, size=8, value_size=8).items()}
    truth = dense_with_gradients({k: a.astype(np.float64) for k, a in halves.items()})
    plain = dense_with_gradients(halves)
    ours = with_gradients(functools.partial(attend, tile=(16, 16)), halves)
    assert jax.tree.map(jnp.result_type, ours) == jax.tree.map(jnp.result_type, plain)
    for one, other, expected in zip(*map(jax.tree.leaves, (ours, plain, truth)), strict=True):
        halves = (np.asarray(x, np.float64) for x in (one, other))
        errors = [np.sqrt(np.mean((x - expected) ** 2)) for x in halves]
        assert errors[0] <= 2 * errors[1]


def test_bias_and_mask_are_positional_and_a_bias_may_be_of_integers_as_in_jax_nn():
    arrays = draw(key_heads=4, value_size=3, dtype=np.float32)
    args = (*arrays.values(), np.round(BIAS).astype(np.int32), MASK)
    ours, expected = jax.jit(dot_product_attention), jax.jit(jax.nn.dot_product_attention)
    assert_close(ours(*args), expected(*args), 5e-6)


def test_a_bias_may_be_wider_than_the_tokens(x64):
    arrays = draw(key_heads=4, dtype=np.float32) | {"bias": BIAS.astype(np.float64)}
    gradients = jax.grad(lambda arrays: jnp.sum(dot_product_attention(**arrays)))
    found = jax.eval_shape(gradients, arrays)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in arrays.items()}


def test_takes_arrays_of_numpy():
    arrays = draw(4, 4, batch=(), dtype=np.float64)
    expected = dot_product_attention(**{k: jnp.asarray(v) for k, v in arrays.items()})
    out = dot_product_attention(**arrays, score_mod=lambda logit, b, h, i, j: logit)
    assert out.dtype == expected.dtype == jnp.float32
    assert_close(out, expected, 1e-6)


# Order of the arguments, and gradients


def alibi(arrays):
    def score_mod(logit, b, h, i, j):
        return logit * (1 + 0.1 * b) - arrays["slopes"][h] * jnp.abs(i - j)

    return score_mod


@pytest.mark.slow
def test_scale_bias_cap_score_mod_mask_and_sink_come_in_this_order(x64):
    arrays = draw() | {
        "bias": rng.normal(size=(2, 4, 11, 14)),
        "scale": np.float64(0.7),
        "sink": rng.normal(size=4),
        "slopes": rng.normal(size=4),
    }
    options = {"logits_soft_cap": 1.5, "is_causal": True, "query_offset": 2}
    known = {"mask": rng.random((2, 1, 11, 14)) < 0.7}

    def function(arrays, known):
        score_mod = alibi(arrays)
        arrays = {name: array for name, array in arrays.items() if name != "slopes"}
        return attend(arrays, known, score_mod=score_mod, **options)

    ours = with_gradients(function, arrays, known)
    expected = dense_with_gradients(arrays, score_mod_of=alibi, **options, **known)
    assert_close(ours, expected, 1e-12)
    assert all(np.abs(gradient).max() > 1e-3 for gradient in ours[1].values())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(14,), (2, 4, 1, 1), (1, 1, 2, 1, 11, 14)])
def test_a_bias_broadcasts_and_its_gradient_has_its_shape(shape, x64):
    arrays = draw() | {"bias": np.random.default_rng(5).normal(size=shape)}
    ours = with_gradients(attend, arrays)
    assert ours[1]["bias"].shape == shape
    # The definition gets the bias of all pairs, so that one program serves all shapes.
    wide = (1, 1, 2, 4, 11, 14)
    of_pairs = np.broadcast_to(arrays["bias"], wide)[0, 0]
    expected = dense_with_gradients(arrays | {"bias": of_pairs})
    given = np.array((1,) * (6 - len(shape)) + shape)
    summed = tuple(np.flatnonzero(given != wide))
    gradient = np.reshape(expected[1]["bias"], wide).sum(summed)
    expected[1]["bias"] = gradient.reshape(shape)
    assert_close(ours, expected, 1e-12)


@pytest.mark.slow
def test_there_may_be_several_batch_dimensions(x64):
    batch = (2, 1, 3)
    arrays = draw(batch=batch) | {"slopes": rng.normal(size=4)}
    known = {"key_value_seq_lengths": rng.integers(1, 14, batch)}

    def function(arrays, known):
        score_mod = alibi(arrays)
        arrays = {name: array for name, array in arrays.items() if name != "slopes"}
        return attend(arrays, known, score_mod=score_mod)

    ours = with_gradients(function, arrays, known)
    assert_close(ours, dense_with_gradients(arrays, score_mod_of=alibi, **known), 1e-12)


# score_mod


def closing_over(table, slope, index, flag):
    """A score_mod that closes over arrays of floats, ints and a bool, and over a Python scalar."""
    factor = 0.1

    def score_mod(logit, b, h, i, j):
        moved = logit + table[index[h], jnp.clip(i - j + 3, 0, 6)] - slope * factor * j
        return jnp.where(flag, moved, 2 * logit)

    return score_mod


LEARNED = {"table": rng.normal(size=(3, 7)), "slope": np.float64(0.3)}
INDICES = np.array([[2, 0, 1, 2], [0, 0, 1, 1]])
FLAGS = np.array([True, False])


def modified(arrays, known):
    score_mod = closing_over(arrays["table"], arrays["slope"], known["index"], known["flag"])
    plain = {name: arrays[name] for name in ("query", "key", "value")}
    return attend(plain, {}, score_mod=score_mod)


def eager_with_gradients(function, arrays, known):
    results, pull_back = jax.vjp(lambda a: function(a, known), arrays)
    return results, pull_back(cotangents(arrays))[0]


RUNS = {
    "eager": eager_with_gradients,
    "gradient of jit": lambda f, *given: eager_with_gradients(jax.jit(f), *given),
}


@functools.cache
def modified_by(n):
    def score_mod_of(arrays):
        return closing_over(arrays["table"], arrays["slope"], jnp.asarray(INDICES[n]), FLAGS[n])

    return score_mod_of


def expected_of_modified(arrays, n):
    return dense_with_gradients(arrays, score_mod_of=modified_by(n))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_score_mod_may_close_over_anything(run, x64):
    arrays = draw() | LEARNED
    known = {"index": jnp.asarray(INDICES[0]), "flag": jnp.asarray(FLAGS[0])}
    assert_close(RUNS[run](modified, arrays, known), expected_of_modified(arrays, 0), 1e-12)


@pytest.mark.slow
def test_what_a_score_mod_closes_over_may_be_batched_by_vmap(x64):
    arrays = draw()

    def each(slope, known):
        return with_gradients(modified, arrays | LEARNED | {"slope": slope}, known)

    slopes = np.array([0.3, -0.4])
    both = jax.jit(jax.vmap(each))(slopes, {"index": INDICES, "flag": FLAGS})
    for n, slope in enumerate(slopes):
        expected = expected_of_modified(arrays | LEARNED | {"slope": slope}, n)
        assert_close(jax.tree.map(lambda x, n=n: x[n], both), expected, 1e-12)


@pytest.mark.parametrize(
    "score_mod, got",
    [
        (lambda logit, b, h, i, j: (logit, logit), r"float32\[\], .*float32\[\]"),
        (lambda logit, b, h, i, j: i - j, r"int32\[\]"),
        (lambda logit, b, h, i, j: logit * jnp.ones(3), r"float32\[3\]"),
        (lambda logit, b, h, i, j: None, "nothing"),
    ],
)
def test_a_score_mod_that_returns_no_logit_is_refused(score_mod, got):
    query = jnp.ones((3, 2, 4))
    with pytest.raises(ValueError, match=f"score_mod.* must return one floating.*got .*{got}"):
        dot_product_attention(query, query, query, score_mod=score_mod)


@pytest.mark.slow
def test_what_a_score_mod_closes_over_does_not_outlive_the_call():
    """Compiled programs are kept, but they do not keep these arrays."""
    query = jnp.ones((3, 2, 4))

    def total(slope):
        out = dot_product_attention(
            query, query, query, score_mod=lambda logit, b, h, i, j: logit - slope[h]
        )
        return out.sum()

    with jax.checking_leaks():
        jax.eval_shape(jax.grad(total), jnp.ones(2))


# Positions


def windowed(arrays, known):
    arrays = dict(arrays)
    slopes = arrays.pop("slopes")
    mod = alibi({"slopes": slopes})
    return attend(arrays, known, score_mod=mod, is_causal=True, local_window_size=(6, 2))


@pytest.mark.parametrize("offset", [-3, 0, 2, 40])
def test_an_offset_may_be_traced(offset, x64):
    arrays = draw() | {"slopes": rng.normal(size=4)}
    ours = with_gradients(windowed, arrays, {"query_offset": np.int64(offset)})
    assert_close(ours, dense_of_windowed(arrays, offset), 1e-12)


def dense_of_windowed(arrays, offset):
    options = {"is_causal": True, "local_window_size": (6, 2), "query_offset": offset}
    return dense_with_gradients(arrays, score_mod_of=alibi, **options)


@pytest.mark.slow
def test_an_offset_may_differ_by_example(x64):
    arrays = draw() | {"slopes": rng.normal(size=4)}
    for offsets in ([5, -2], [0, 9]):
        ours = with_gradients(windowed, arrays, {"query_offset": np.array(offsets)})
        assert_close(ours, dense_of_windowed(arrays, np.array(offsets)), 1e-12)


def test_the_offsets_of_examples_may_be_far_apart(x64, monkeypatch):
    """The window of each example is read at once, or in tiles."""
    arrays, options = draw(40, 300, key_heads=2), {"local_window_size": (50, 9)}
    known = {"query_offset": np.array([-20, 271])}
    expected = dense_with_gradients(arrays, **known, **options)
    for widest in (1024, 64):
        monkeypatch.setattr(walks, "_WIDEST_BAND", widest)
        run = functools.partial(attend, **options, tile=(16, 24))
        assert_close(with_gradients(run, arrays, known), expected, 1e-12)


def test_windows_whose_offsets_differ_read_no_more_keys_than_they_hold():
    """The cost does not depend on the number of keys."""

    def operations(keys):
        arrays, offset = draw(256, keys, dtype=np.float32), np.int32([9, 500])
        run = functools.partial(sliding_window_attention, local_window_size=(1023, 0))
        closed = jax.make_jaxpr(lambda arrays, offset: run(**arrays, query_offset=offset))
        return cost.operations(closed(arrays, offset))

    assert operations(16384) == operations(4096)


def test_integers_of_any_width_are_taken(x64):
    """Sums of integers of 8 bits would overflow."""
    arrays = draw(300, 300, heads=2, key_heads=1)
    known = {"key_value_seq_lengths": [200, 131], "query_seq_lengths": [250, 7]}
    known["query_offset"] = [3, 5]
    run = jax.jit(functools.partial(sliding_window_attention, local_window_size=3, dilation=8))
    expected = run(**arrays, **{name: np.int32(each) for name, each in known.items()})
    for dtype in (np.uint8, np.int64):
        same = {name: np.array(each, dtype) for name, each in known.items()}
        np.testing.assert_array_equal(run(**arrays, **same), expected)


@pytest.mark.slow
def test_vmap_goes_over_offsets_lengths_masks_and_ids(x64):
    arrays = draw(batch=())
    known = {
        "query_offset": np.array([0, 2, -1]),
        "key_value_seq_lengths": np.array([14, 3, 8]),
        "segment_ids": (rng.integers(0, 3, (3, 11)), rng.integers(0, 3, (3, 14))),
        "mask": rng.random((3, 1, 11, 14)) < 0.7,
    }
    causal = functools.partial(attend, is_causal=True)
    together = jax.jit(jax.vmap(lambda known: with_gradients(causal, arrays, known)))(known)
    for n in range(3):
        one = jax.tree.map(lambda x, n=n: x[n], known)
        expected = dense_with_gradients(arrays, is_causal=True, **one)
        assert_close(jax.tree.map(lambda x, n=n: x[n], together), expected, 1e-12)


# Emptiness and padding


@pytest.mark.parametrize(
    "function",
    [
        dot_product_attention,
        functools.partial(sliding_window_attention, local_window_size=(2, 0), dilation=3),
    ],
    ids=["exact", "dilated window"],
)
@pytest.mark.parametrize("batch, queries, keys", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)])
def test_there_may_be_no_tokens(function, batch, queries, keys):
    arrays = draw(queries, keys, (batch,), dtype=np.float32)
    results, gradients = with_gradients(
        lambda a, known: function(**a, return_residual=True), arrays
    )
    out, lse = results
    np.testing.assert_array_equal(out, np.zeros((batch, queries, 4, 5)))
    np.testing.assert_array_equal(lse, np.full((batch, queries, 4), -np.inf))
    assert_close(gradients, jax.tree.map(np.zeros_like, arrays), 0)


def test_a_sink_without_keys_is_the_whole_softmax():
    arrays = draw(5, 0, dtype=np.float32)
    sink = np.arange(4, dtype=np.float32)
    run = jax.jit(functools.partial(dot_product_attention, return_residual=True))
    out, lse = run(**arrays, sink=sink)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(lse, np.broadcast_to(sink, lse.shape))


@pytest.mark.slow
def test_nothing_leaks_from_padding(x64):
    arrays, (d_out, d_lse) = draw(), cotangents(draw())
    ids = np.array([[1] * 4 + [2] * 6 + [0] * 4, [3] * 12 + [0] * 2])
    known = {
        "query_seq_lengths": np.array([9, 11]),
        "key_value_seq_lengths": np.array([14, 7]),
        "segment_ids": (ids[:, :11], ids),
        "mask": (np.arange(14) != 2)[None, None, None],
    }
    valid = (np.arange(11) < known["query_seq_lengths"][:, None]) & (ids[:, :11] != 0)
    present = (np.arange(14) < known["key_value_seq_lengths"][:, None]) & (ids != 0)
    present &= known["mask"][0, 0, 0]
    absent = {"query": ~valid, "key": ~present, "value": ~present}
    spoilt = {k: np.where(absent[k][..., None, None], np.nan, a) for k, a in arrays.items()}
    d_spoilt = (
        np.where(valid[..., None, None], d_out, np.nan),
        np.where(valid[..., None], d_lse, np.nan),
    )

    @jax.jit
    def program(arrays, cotangents):
        results, pull_back = jax.vjp(functools.partial(attend, known=known), arrays)
        return results, pull_back(cotangents)[0]

    clean = program(arrays, (d_out, d_lse))
    jax.tree.map(np.testing.assert_array_equal, program(spoilt, d_spoilt), clean)
    assert_close(clean, dense_with_gradients(arrays, **known), 1e-12)


@pytest.mark.parametrize("of_examples", [2, 1])
def test_a_bias_of_padding_reaches_nothing(of_examples):
    arrays = draw(dtype=np.float32)
    known = {"query_seq_lengths": np.int32([9, 7]), "key_value_seq_lengths": np.int32([6, 11])}
    bias = rng.normal(size=(of_examples, 1, 11, 14)).astype(np.float32)
    spoilt = bias.copy()
    spoilt[..., 9:, :] = np.nan
    spoilt[..., 11:] = np.nan
    run = functools.partial(attend, known=known, logits_soft_cap=3.0)
    results = [with_gradients(lambda a, _: run(a), arrays | {"bias": b}) for b in (bias, spoilt)]
    jax.tree.map(np.testing.assert_array_equal, *results)


# Magnitudes


@pytest.mark.parametrize("least", [-1e9, slow(np.finfo(np.float32).min)])
def test_rows_that_a_finite_bias_masks_have_the_gradients_of_jax_nn(least):
    """Beside -1e9, the logarithm of the number of keys is lost in the log-sum-exp."""
    arrays = draw(64, 64, key_heads=4, value_size=3, dtype=np.float32)
    bias = np.where(np.tri(64, k=-5, dtype=bool), 0, least).astype(np.float32)[None, None]
    weights = cotangents(arrays)[0]

    def total(function, arrays):
        return jnp.sum(function(**arrays) * weights)

    functions = (
        functools.partial(dot_product_attention, tile=(32, 16)),
        jax.nn.dot_product_attention,
    )
    ours, theirs = (jax.grad(total, 1)(f, arrays | {"bias": bias}) for f in functions)
    assert_close(ours, theirs, 1e-5)


def test_the_log_sum_exp_of_such_rows_has_a_gradient_that_sums_to_one():
    arrays = draw(4, 64, dtype=np.float32)

    def total(bias):
        return dot_product_attention(**arrays, bias=bias, return_residual=True)[1].sum()

    gradient = jax.grad(total)(jnp.full((2, 4, 4, 64), -1e9))
    np.testing.assert_allclose(gradient.sum(-1), 1, rtol=1e-5)


def test_a_scale_is_not_rounded_to_16_bits():
    query = key = value = jnp.ones((1, 1, 1), jnp.bfloat16)
    _, lse = dot_product_attention(query, key, value, scale=1 + 2**-9, return_residual=True)
    assert lse == 1 + 2**-9


def test_gradients_of_what_all_tiles_share_are_added_in_float32():
    """In bfloat16, a sum over many tiles stops growing."""
    arrays = draw(512, 512, (1,), dtype=np.float32)
    given = {"scale": jnp.bfloat16(0.5), "slopes": jnp.full(4, 0.125, jnp.bfloat16)}

    def total(given, tile):
        def score_mod(logit, b, h, i, j):
            return logit - given["slopes"][h].astype(jnp.float32) * jnp.abs(i - j)

        out = dot_product_attention(
            **arrays, scale=given["scale"], score_mod=score_mod, tile=(tile, tile)
        )
        return jnp.sum(out * arrays["value"][..., :1, :])

    small, whole = (jax.jit(jax.grad(total), static_argnums=1)(given, t) for t in (16, 512))
    small, whole = (jax.tree.map(np.float64, tree) for tree in (small, whole))
    assert_close(small, whole, 2**-7)


# Compilation


def test_an_exported_program_may_leave_its_batch_open():
    (batch,) = jax.export.symbolic_shape("b")
    of = jax.ShapeDtypeStruct((batch, 24, 4, 8), jnp.float32)
    run = jax.jit(lambda x: dot_product_attention(x, x, x, is_causal=True))
    query = jnp.ones((3, 24, 4, 8))
    np.testing.assert_array_equal(jax.export.export(run)(of).call(query), run(query))


def test_an_eager_call_compiles_once(caplog):
    arrays = draw(7, 7, dtype=np.float32)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    options = {
        "is_causal": True,
        "local_window_size": (4, 0),
        "query_offset": jnp.int32(2),
        "sink": jnp.zeros(4),
    }

    def compilations():
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            jax.block_until_ready(dot_product_attention(**arrays, **options))
        return [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]

    assert any("block_attention" in message for message in compilations())
    assert compilations() == []


@pytest.mark.slow
def test_the_hessian_is_that_of_a_dense_form():
    query, weights = np.random.default_rng(0).normal(size=(2, 5, 1, 2))

    def ours(query):
        out = dot_product_attention(query, query, query, is_causal=True, tile=(2, 2))
        return jnp.sum(weights * out**2)

    def dense(query):
        logits = query[:, 0] @ query[:, 0].T / np.sqrt(2)
        shares = jax.nn.softmax(jnp.where(np.tri(5, dtype=bool), logits, -jnp.inf))
        return jnp.sum(weights * (shares @ query[:, 0])[:, None] ** 2)

    with jax.enable_x64(True):
        got, expected = (jax.jit(jax.hessian(f))(jnp.asarray(query)) for f in (ours, dense))
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_second_derivatives_that_there_are_not_say_what_to_use():
    def attend(query):
        return dot_product_attention(query, query, query, is_causal=True, tile=(2, 2)).sum()

    query = jnp.ones((3, 1, 2))
    of_gradient = jax.grad(lambda query: jax.grad(attend)(query).sum())
    of_tangent = jax.grad(lambda query: jax.jvp(attend, (query,), (query,))[1])
    for function, message in (
        (of_gradient, "use jax.jvp of jax.grad"),
        (of_tangent, "use jax.jvp of jax.grad"),
    ):
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(function, query)
