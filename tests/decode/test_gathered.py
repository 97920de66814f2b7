"""A decoding step with a sparse pattern reads only the keys that the pattern reaches."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import effattn
from effattn import patterns, registry
from effattn.analysis import cost
from effattn.decode import GatheredDecoder, gathered
from effattn.patterns.blocks import BlockLists
from effattn.testing import functions
from tests.laws.sharding import collectives, mesh
from tests.marks import slow

SPARSE_TRANSFORMERS = {
    "strided": {"stride": 4},
    "strided first": {"stride": 4, "factor": "first"},
    "strided second": {"stride": 4, "factor": "second"},
    "fixed": {"stride": 4, "kind": "fixed", "summary": 2},
    "fixed first": {"stride": 4, "kind": "fixed", "factor": "first"},
    "fixed second": {"stride": 4, "kind": "fixed", "summary": 2, "factor": "second"},
    "a stride longer than the text": {"stride": 20},
    "a block longer than the text": {"stride": 20, "kind": "fixed"},
    "a stride of one": {"stride": 1},
}
LENGTH, HEADS, KEY_HEADS = 12, 4, 2


def decoder_of(name, **options):
    entry = registry.get(name)
    return registry.load(entry.decoder)(entry.function, {**entry.options, **options})


def draw(time, batch=2, size=8, value_size=6, heads=HEADS, key_heads=KEY_HEADS):
    rng = np.random.default_rng(0)
    shapes = [(heads, size), (key_heads, size), (key_heads, value_size)]
    return [rng.normal(size=(batch, time, *shape)).astype(np.float32) for shape in shapes]


def empty(decoder, batch, capacity, size=8, value_size=6, key_heads=KEY_HEADS):
    return decoder.init(batch, capacity, key_heads, size, value_size, jnp.float32)


def extended(decoder, arrays, split, capacity=LENGTH):
    """Outputs of consecutive `extend` calls, joined along the tokens."""
    state, outs, start = empty(decoder, len(arrays[0]), capacity), [], 0
    extend = jax.jit(decoder.extend)
    for time in split:
        out, state = extend(*(x[:, start : start + time] for x in arrays), state)
        outs.append(out)
        start += time
    return np.concatenate(outs, 1)


# Reached keys


def reached_by(decoder, capacity):
    """Keys that each of `capacity` tokens reaches, one list or a list a head; and their length."""
    pattern = decoder._pattern_for(capacity, HEADS, KEY_HEADS)
    of_all = jax.jit(jax.vmap(lambda i: pattern.reach(i, capacity)))
    each = np.asarray(of_all(np.arange(capacity)))
    return each, each.shape[-1]


def assert_reached(rows, expected):
    """Checks that each token reaches each key of the mask `(T, T)` once, and no other key."""
    for i, (row, allowed) in enumerate(zip(rows, expected, strict=True)):
        assert sorted(j for j in row if 0 <= j <= i) == np.flatnonzero(allowed).tolist()


@pytest.mark.parametrize("options", SPARSE_TRANSFORMERS.values(), ids=SPARSE_TRANSFORMERS)
@pytest.mark.parametrize("capacity", [1, 11])
def test_a_sparse_transformer_reaches_its_pattern_and_each_key_once(options, capacity):
    rows, _ = reached_by(decoder_of("sparse_transformer", **options), capacity)
    stride, factor = options["stride"], options.get("factor", "merged")
    if options.get("kind") == "fixed":
        first, second = patterns.SlidingWindow(0, 0, stride), None
        second = patterns.Fixed(stride, options.get("summary", 1))
    else:
        first, second = patterns.SlidingWindow(stride, 0), patterns.Strided(stride)
    both = {"merged": first | second, "first": first, "second": second}[factor]
    assert_reached(rows, (patterns.Causal() & both).mask(capacity))


@pytest.mark.parametrize(
    "options",
    [
        {"num_window_blocks": 3, "num_global_blocks": 1},
        {"num_window_blocks": 1, "num_global_blocks": 0, "seed": 7},
        {"num_window_blocks": 5, "num_global_blocks": 2, "num_random_blocks": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [4, 40])
def test_bigbird_reaches_its_pattern_and_each_key_once(options, capacity):
    """Each key head has its own draw. Near the start, window and global blocks overlap."""
    options = {"num_random_blocks": 2, "seed": 0, **options, "block_size": 3}
    rows, _ = reached_by(decoder_of("bigbird", **options), capacity)
    for head in range(KEY_HEADS):
        of_head = {**options, "seed": options["seed"] + head}
        expected = patterns.bigbird(**of_head, causal=True).mask(capacity)
        assert_reached([row[head] for row in rows], expected)


def test_random_blocks_that_are_named_reach_what_they_name():
    """The table has too many rows, names later blocks, and names one block twice."""
    table = np.array([[1, -1], [0, 0], [0, 2], [1, 5], [3, 2], [0, 1]])
    rows, _ = reached_by(decoder_of("random", block_size=2, random_blocks=table), 8)
    blocks = [{0}, {0, 1}, {0, 2}, {1, 3}]
    expected = [[j <= i and j // 2 in blocks[i // 2] for j in range(8)] for i in range(8)]
    assert_reached(rows, expected)


@pytest.mark.parametrize("heads", [(), (1,), (KEY_HEADS,)])
def test_a_traced_table_or_mask_reaches_what_a_known_one_reaches(heads):
    table = np.random.default_rng(0).integers(-1, 4, (*heads, 4, 2))
    mask = np.random.default_rng(1).random((*heads, 4, 4)) < 0.5

    def reached(given):
        found = []
        for name, option in (("bigbird", "random_blocks"), ("block_sparse", "block_mask")):
            decoder = decoder_of(name, block_size=3, **{option: given[option]})
            pattern = decoder._pattern_for(11, HEADS, KEY_HEADS)
            rows = jax.vmap(lambda i, p=pattern: p.reach(i, 11))(np.arange(11))
            found.append(rows.reshape(11, -1, rows.shape[-1]))
        return found

    # A known mask is for query heads, and a traced mask is for key heads.
    of_query_heads = mask.repeat(HEADS // KEY_HEADS, 0) if heads == (KEY_HEADS,) else mask
    known = reached({"random_blocks": table, "block_mask": of_query_heads})
    known[1] = known[1][:, :: -(-known[1].shape[1] // KEY_HEADS)]
    traced = jax.jit(reached)({"random_blocks": table, "block_mask": mask})
    for each, expected in zip(map(np.asarray, traced), map(np.asarray, known), strict=True):
        for i, lists in enumerate(zip(each, expected, strict=True)):
            for rows in zip(*lists, strict=True):
                seen, needed = (sorted(row[(row >= 0) & (row <= i)].tolist()) for row in rows)
                assert seen == needed


@pytest.mark.parametrize("lists", [(), (1,), (HEADS,)])
def test_a_block_mask_reaches_what_it_shows(lists):
    """The lists are as long as the mask's longest row; query heads may have different masks."""
    mask = np.random.default_rng(0).random((*lists, 5, 5)) < 0.4
    rows, asked = reached_by(decoder_of("block_sparse", block_size=3, block_mask=mask), 13)
    assert asked == 3 * np.tril(mask).sum(-1).max()
    each = np.tril(mask.repeat(3, -2).repeat(3, -1)[..., :13, :13])
    rows = rows.reshape(13, *lists, -1)
    for head in np.ndindex(lists):
        assert_reached([row[head] for row in rows], each[head])


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"stride": 32}, 32 + 31),
        ({"stride": 32, "factor": "first"}, 33),
        ({"stride": 30, "factor": "second"}, 35),
        ({"stride": 32, "kind": "fixed", "summary": 4}, 32 + 4 * 32),
        ({"stride": 32, "kind": "fixed", "factor": "first"}, 32),
        ({"stride": 32, "kind": "fixed", "summary": 4, "factor": "second"}, 4 * 32),
    ],
)
def test_no_more_keys_are_gathered_than_are_reached(options, most):
    _, asked = reached_by(decoder_of("sparse_transformer", **options), 1024)
    assert asked == most


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sparse_transformer", {"stride": 2**16}),
        ("sparse_transformer", {"stride": 2**16, "kind": "fixed", "summary": 2}),
        ("bigbird", {"block_size": 2**16}),
        ("random", {"block_size": 2**16}),
        ("block_sparse", {"block_size": 2**16, "block_mask": np.ones((1, 1), bool)}),
    ],
    ids=str,
)
def test_blocks_and_strides_longer_than_the_text_gather_no_more_than_it_of_each(name, options):
    """The outputs of every such mechanism are those of exact attention."""
    decoder, arrays = decoder_of(name, **options), draw(LENGTH)
    _, asked = reached_by(decoder, LENGTH)
    assert asked <= 5 * LENGTH
    out = extended(decoder, arrays, (5, 1, LENGTH - 6))
    whole = effattn.dot_product_attention(*arrays, is_causal=True)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sparse_transformer", "bigbird"])
def test_no_rows_give_an_empty_array(name):
    decoder = decoder_of(name)
    out, state = decoder.extend(*draw(3, batch=0), empty(decoder, 0, LENGTH))
    assert out.shape == (0, 3, HEADS, 6) and state.length.shape == (0,)


def test_a_block_that_is_named_again_counts_once():
    blocks = np.array([[3, -1, 0, 3], [2, 2, 2, 1]])
    reached = jax.jit(lambda table, i: BlockLists(table, 2).reach(i, 100))
    found = [np.asarray(reached(blocks, i)) for i in (0, 2)]
    assert [sorted(row[row >= 0]) for row in found] == [[0, 1, 6, 7], [2, 3, 4, 5]]


# Outputs


@pytest.mark.parametrize(
    "options",
    [SPARSE_TRANSFORMERS["fixed"], slow(SPARSE_TRANSFORMERS["strided second"])],
    ids=str,
)
def test_two_halves_equal_the_whole(options):
    arrays = draw(LENGTH)
    function = functools.partial(effattn.sparse_transformer_attention, **options)
    whole = jax.jit(function)(*arrays)
    decoder = decoder_of("sparse_transformer", **options)
    # A larger capacity changes nothing.
    out = extended(decoder, arrays, (LENGTH // 2,) * 2, capacity=LENGTH + 5)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)


def score_mod(logit, b, h, i, j):
    return logit + jnp.cos(1.0 + b + 2 * h + i * j)


EVERYTHING = {
    "scale": 0.7,
    "logits_soft_cap": 2.0,
    "score_mod": score_mod,
    "sink": np.linspace(-1, 1, HEADS, dtype=np.float32),
}


@pytest.mark.parametrize("lists", [None, slow(KEY_HEADS), HEADS])
def test_lists_of_all_of_key_and_of_query_heads(lists, monkeypatch):
    """The core's options see the positions, rows and heads of the whole sequence."""

    class Steps(patterns.Pattern):
        """Every third key, or by head every second, third, ... key."""

        def reach(self, i, capacity):
            steps = jnp.arange(2, 2 + lists) if lists else jnp.array(3)
            return i - steps[..., None] * jnp.arange(4)

    monkeypatch.setattr(gathered, "_tokens_at_a_time", lambda numbers, time: 4)
    arrays = draw(LENGTH)
    decoder = GatheredDecoder(effattn.dot_product_attention, EVERYTHING, Steps)
    out = extended(decoder, arrays, (LENGTH // 2,) * 2)
    each = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    steps = np.arange(2, 2 + lists) if lists else np.array([3])
    steps = np.repeat(steps, HEADS // len(steps))[:, None, None]
    mask = (each >= 0) & (each % steps == 0) & (each // steps < 4)
    function = functools.partial(effattn.dot_product_attention, mask=mask, **EVERYTHING)
    whole = jax.jit(function)(*arrays)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_a_prefill(monkeypatch):
    monkeypatch.setattr(gathered, "_tokens_at_a_time", lambda numbers, time: 4)
    decoder = decoder_of("sparse_transformer", stride=3, factor="first")

    def through_decoder(arrays):
        return decoder.extend(*arrays, empty(decoder, 2, LENGTH))[0]

    def through_whole(arrays):
        return effattn.sparse_transformer_attention(*arrays, stride=3, factor="first")

    def gradients(function):
        return jax.jit(jax.grad(lambda arrays: (function(arrays) ** 2).sum()))(draw(LENGTH))

    functions.assert_close(gradients(through_decoder), gradients(through_whole), 1e-5)


# Cost


CAPACITIES = (1024, 16384)


def abstract(decoder, time, capacity):
    """The arguments of `extend` as shapes."""
    arrays = [jax.ShapeDtypeStruct((1, time, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    return *arrays, jax.eval_shape(lambda: empty(decoder, 1, capacity, 16, 16))


def operations(decoder, *args):
    return cost.operations(jax.make_jaxpr(decoder.extend)(*args))


def memory(decoder, *args):
    """Temporary bytes of the compiled step, which may overwrite the given state."""
    lowered = jax.jit(decoder.extend, donate_argnums=3).lower(*args)
    memory = lowered.compile().memory_analysis()
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[3]))
    assert memory.alias_size_in_bytes >= state_bytes
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(
    "name", ["sliding_window", "longformer", "bigbird", slow("random"), slow("block_sparse")]
)
def test_a_step_costs_the_same_at_all_capacities(name):
    decoder = decoder_of(name)
    first, second = (abstract(decoder, 1, capacity) for capacity in CAPACITIES)
    assert operations(decoder, *first) == operations(decoder, *second)
    assert memory(decoder, *first) == memory(decoder, *second)


@pytest.mark.parametrize("kind", ["strided", slow("fixed")])
def test_a_step_of_a_sparse_transformer_costs_the_root_of_the_capacity(kind):
    found = []
    for capacity in CAPACITIES:
        decoder = decoder_of("sparse_transformer", kind=kind, stride=math.isqrt(capacity))
        args = abstract(decoder, 1, capacity)
        found.append((operations(decoder, *args), memory(decoder, *args)))
    of_operations, of_memory = (
        cost.exponent(CAPACITIES, costs) for costs in zip(*found, strict=True)
    )
    assert abs(of_operations - 0.5) <= 0.05, found
    assert of_memory <= 0.55, found


def test_a_prefill_needs_time_and_memory_linear_in_its_length():
    decoder = decoder_of("sparse_transformer", stride=32, factor="first")
    found = []
    for length in CAPACITIES:
        args = abstract(decoder, length, length)
        found.append((operations(decoder, *args), memory(decoder, *args)))
    of_operations, of_memory = (
        cost.exponent(CAPACITIES, costs) for costs in zip(*found, strict=True)
    )
    assert abs(of_operations - 1) <= 0.05, found
    assert of_memory <= 1.05, found
    # The 33 keys and values that each token reaches are never held for all tokens at once.
    assert found[-1][1] < length * 33 * KEY_HEADS * (16 + 16) * 4


@pytest.mark.devices
@pytest.mark.parametrize("time", [1, 6])
def test_rows_and_heads_on_eight_devices_need_no_collective(time):
    decoder = decoder_of("sparse_transformer", stride=4)
    by_head = NamedSharding(mesh(), PartitionSpec("batch", None, "heads"))
    arrays = jax.device_put(draw(time, batch=4), by_head)
    state = empty(decoder, 4, LENGTH)
    state = dataclasses.replace(
        state,
        key=jax.device_put(state.key, by_head),
        value=jax.device_put(state.value, by_head),
        length=jax.device_put(state.length, NamedSharding(mesh(), PartitionSpec("batch"))),
    )
    compiled = jax.jit(decoder.extend).lower(*arrays, state).compile()
    assert collectives(compiled) == []


# Refusals


def test_a_full_cache_raises_when_the_lengths_are_known():
    decoder = decoder_of("sparse_transformer", stride=2)
    state = dataclasses.replace(empty(decoder, 2, 5), length=jnp.array([4, 2]))
    with pytest.raises(ValueError, match="holds at most 5 tokens a row, got 6"):
        decoder.extend(*draw(2), state)


def test_a_traced_overflow_is_not_seen():
    """Tokens past the capacity attend to the stored tokens only."""
    decoder = decoder_of("sparse_transformer", stride=4)
    query, key, value = draw(7)
    state, lengths = empty(decoder, len(query), 5), jnp.full(len(query), 7)
    out, _ = jax.jit(decoder.extend)(query, key, value, state, lengths)
    # At such an early position, a token reaches the 4 tokens before it.
    options = {"is_causal": True, "local_window_size": (4, 0)}
    attend = jax.jit(functools.partial(effattn.dot_product_attention, **options))
    stored = attend(query, key[:, :5], value[:, :5])
    np.testing.assert_allclose(out, stored, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride must be an int, 1 or more tokens, got 0"),
        ({"global_mask": 1}, ValueError, "sparse_transformer_attention does not take global_mask"),
        ({"implementation": "pallas"}, NotImplementedError, "has no 'pallas' implementation"),
        ({"sink": jnp.zeros(3)}, ValueError, "sink must be floating point of shape"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_named(options, error, message):
    decoder = decoder_of("sparse_transformer", **options)
    with pytest.raises(error, match=message):
        jax.eval_shape(decoder.extend, *draw(1), empty(decoder, 2, 5))


def test_the_last_blocks_of_a_text_that_is_being_written_are_not_known():
    decoder = decoder_of("bigbird", num_global_blocks=(1, 1))
    with pytest.raises(ValueError, match="got 1; for BigBird pass num_global_blocks=1"):
        jax.eval_shape(decoder.extend, *draw(1), empty(decoder, 2, 5))
