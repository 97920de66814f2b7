"""The table of docs/performance.md: every mechanism runs by the call that it names."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import parallel, registry
from effattn.testing.functions import assert_close
from tests.marks import slow_but_for
from tests.parallel import test_modules
from tests.parallel.test_heads import moved

pytestmark = pytest.mark.devices

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "performance.md"
ROW = re.compile(
    r"^\| `(ring_attention|pass_states|share_keys|exchange_\w+)` \|([^|]*)\|[^|]*\|$", re.M
)
ROWS = [
    (name, call)
    for call, mechanisms in ROW.findall(PAGE.read_text())
    for name in re.findall(r"`(\w+)`", mechanisms)
]
CALLED = dict(ROWS)

BATCH, TOKENS, HEADS, KEY_HEADS, SIZE, DEVICES = 2, 32, 4, 2, 8, 4
OF_TOKENS, OF_HEADS = P(None, "sequence"), P()
RNG = np.random.default_rng(0)


def numbers(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)


PROJECTION = np.kron(np.eye(4), np.full(TOKENS // 4, 4 / TOKENS)).astype(np.float32)
IN_BLOCK = np.kron(np.eye(2), np.full(4, 1 / 4)).astype(np.float32)
BLOCKS = RNG.integers(0, 8, (KEY_HEADS, 8, 2)).astype(np.int32)
# Options that are the same on all devices, and arrays by head or by token.
OPTIONS = {
    "softmax": {"is_causal": True},
    "sigmoid": {"logit_bias": -2.0},
    "squared_relu": {"divisor": 7.0},
    "sliding_window": {"local_window_size": (7, 3)},
    "dilated": {"local_window_size": (2, 1), "dilation": 3},
    "longformer": {"local_window_size": 3},
    "streaming": {"num_sinks": 2, "window_size": 7},
    "adaptive_span": {"max_span": 7, "ramp": 3.0},
    "sparse_transformer": {"stride": 4},
    "block_sparse": {"block_size": 4, "block_mask": lambda m, n: (m + 2 * n) % 3 != 1},
    "bigbird": {"block_size": 4, "num_window_blocks": 1},
    "random": {"block_size": 4},
    "moba": {"block_size": 4, "top_k": 3},
    "learned_blocks": {"block_size": 4, "top_k": 3},
    "sinkhorn": {"block_size": 4},
    "indexed": {"top_k": 7},
    "infini": {"segment_size": 4, "delta_rule": True},
    "native_sparse": {"compression_size": 4, "compression_stride": 2, "block_size": 4},
    "hierarchical": {"segment_size": 4, "num_levels": 2, "num_summaries": 2, "is_causal": True},
    "based": {"is_causal": True, "local_window_size": (3, 0)},
    "cosformer": {"is_causal": True, "max_length": TOKENS},
    "hedgehog": {"is_causal": True},
    "performer": {"is_causal": True},
    "linformer": {"key_projection": PROJECTION, "value_projection": PROJECTION},
    "talking_heads": {"is_causal": True},
    "block_linformer": {"key_projection": IN_BLOCK, "value_projection": IN_BLOCK},
    "long_short": {"window_size": 3, "segment_size": 4, "projection": IN_BLOCK.T},
    "nystrom": {"num_landmarks": 4},
    "lsh": {"num_rounds": 2, "num_buckets": 4, "chunk_length": 4},
    "routing": {"cluster_size": 8},
}
ARRAYS = {
    "forgetting": {"log_forget": -jnp.abs(numbers(BATCH, TOKENS, HEADS))},
    "log_linear": {
        "log_decay": -jnp.abs(numbers(BATCH, TOKENS, KEY_HEADS)),
        "levels": jnp.abs(numbers(BATCH, TOKENS, HEADS, 4)),
    },
    "ttt_linear": {
        "learning_rate": jnp.abs(numbers(BATCH, TOKENS, KEY_HEADS)) / SIZE,
        "initial_weights": numbers(KEY_HEADS, SIZE, SIZE),
        "initial_bias": numbers(KEY_HEADS, SIZE),
        "norm_scale": numbers(KEY_HEADS, SIZE),
        "norm_bias": numbers(KEY_HEADS, SIZE),
    },
    "titans": {
        "learning_rate": jnp.abs(numbers(BATCH, TOKENS, KEY_HEADS)) / SIZE,
        "momentum": jax.nn.sigmoid(numbers(BATCH, TOKENS, KEY_HEADS)),
        "log_decay": -jnp.abs(numbers(BATCH, TOKENS, KEY_HEADS)),
    },
    "path": {
        "reflection": numbers(BATCH, TOKENS, KEY_HEADS, SIZE) / 2,
        "beta": jnp.abs(numbers(BATCH, TOKENS, KEY_HEADS)),
    },
    "additive": {
        "query_kernel": numbers(HEADS, SIZE, 3),
        "key_kernel": numbers(HEADS, SIZE, 3),
        "score": numbers(HEADS, 3),
    },
    "differential": {"lambda_": numbers(HEADS)},
    "bigbird": {"random_blocks": BLOCKS},
    "random": {"random_blocks": BLOCKS},
    "hierarchical": {"summary_query": numbers(KEY_HEADS, SIZE)},
    "hedgehog": {
        "query_projection": numbers(KEY_HEADS, 4, SIZE),
        "key_projection": numbers(KEY_HEADS, 4, SIZE),
    },
    "performer": {"projection": numbers(KEY_HEADS, 7, SIZE)},
    "random_features": {"projection": numbers(KEY_HEADS, 7, SIZE) / 3},
    "adaptive_span": {"span": jnp.abs(numbers(HEADS))},
    "learned_blocks": {
        "selection_query": numbers(BATCH, TOKENS, KEY_HEADS, 3),
        "selection_key": numbers(BATCH, TOKENS, KEY_HEADS, 3),
    },
    "sinkhorn": {"sort_projection": numbers(KEY_HEADS, 8, SIZE)},
    "selective": {
        "selection_query": numbers(BATCH, TOKENS, 1, 3),
        "selection_key": numbers(BATCH, TOKENS, 1, 3),
    },
    "streaming": {"sink_query": numbers(BATCH, TOKENS, HEADS, SIZE)},
    "native_sparse": {"gates": numbers(BATCH, TOKENS, HEADS, 3)},
    "indexed": {
        "index_query": numbers(BATCH, TOKENS, 2, 5),
        "index_key": numbers(BATCH, TOKENS, 5),
        "index_weights": numbers(BATCH, TOKENS, 2),
    },
    "long_short": {
        "window_norm": (numbers(KEY_HEADS, SIZE), numbers(KEY_HEADS, SIZE)),
        "slot_norm": (numbers(KEY_HEADS, SIZE), numbers(KEY_HEADS, SIZE)),
    },
    "nystrom": {"skip_kernel": numbers(KEY_HEADS, 3)},
    "talking_heads": {"logits_mix": numbers(HEADS, 3), "weights_mix": numbers(3, HEADS)},
    "infini": {"gate": numbers(HEADS)},
    "lsh": {"rotations": effattn.lsh_rotations(jax.random.key(0), 2, 4, SIZE, num_heads=HEADS)},
    "routing": {"centroids": numbers(HEADS, 5, SIZE)},
}

# Arrays of tokens that the naive form replaces by the selected keys.
OF_THE_INDEX = "index_query", "index_key", "index_weights"


def inputs_of(name):
    """The arrays of tokens."""
    if name == "lsh":
        return [numbers(BATCH, TOKENS, HEADS, SIZE) for _ in range(2)]
    if name == "synthesizer_factorized":
        return [numbers(BATCH, TOKENS, HEADS, n) for n in (8, 4, SIZE)]
    heads = [HEADS] * 3 if name.startswith("synthesizer") else [HEADS, KEY_HEADS, KEY_HEADS]
    return [numbers(BATCH, TOKENS, n, SIZE) for n in heads]


def attended(name, call=None, **options):
    """Output and gradients of the inputs and of the other arrays."""
    function = registry.get(name).function
    function = functools.partial(function, **OPTIONS.get(name, {}), **options)
    inputs, arrays = INPUTS[name], ARRAYS.get(name, {})
    given = {n: x for n, x in arrays.items() if n != "random_blocks"}
    fixed = {n: x for n, x in arrays.items() if n == "random_blocks"}

    def run(inputs, given, cotangent):
        attend = functools.partial(function, **fixed)
        if call is not None:
            attend = call(attend, "sequence")
        out, back = jax.vjp(lambda inputs, given: attend(*inputs, **given), inputs, given)
        return out, back(cotangent)

    operands = inputs, given, numbers_like(inputs[0], inputs[-1])
    if call is None:
        return jax.jit(run)(*operands)
    mesh = parallel.make_mesh(sequence=DEVICES, devices=jax.devices()[:DEVICES])
    per_token = {*registry.get(name).naive.per_token, *OF_THE_INDEX}
    specs = {n: OF_TOKENS if n in per_token else OF_HEADS for n in given}
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(OF_TOKENS, specs, OF_TOKENS),
        out_specs=(OF_TOKENS, (OF_TOKENS, specs)),
    )
    return jax.jit(sharded)(*operands)


def equal(found, right):
    (out, gradients), (right_out, right_gradients) = found, right
    assert_close(out, right_out, 1e-5)
    assert_close(gradients, right_gradients, 1e-4)


def numbers_like(query, value):
    shape = (*query.shape[:-1], value.shape[-1])
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


SHARED = [
    name for name, call in ROWS if call == "share_keys" and registry.get(name).function is not None
]
BY_HEADS = [
    name
    for name, call in ROWS
    if call in ("exchange_heads", "share_keys")
    and registry.get(name).function is not None
    and name != "talking_heads"  # no device may have some of its heads alone
]
INPUTS = {name: inputs_of(name) for name in {*BY_HEADS, *SHARED}}


def test_each_mechanism_has_one_row():
    assert sorted(name for name, _ in ROWS) == sorted(registry.names())


# All heads of indexed attention choose alike, by arrays without heads.
@pytest.mark.parametrize("name", slow_but_for([], [n for n in BY_HEADS if n != "indexed"]))
def test_exchange_heads_takes_the_mechanism(name):
    equal(attended(name, parallel.exchange_heads), attended(name))


@pytest.mark.parametrize("name", slow_but_for([], SHARED))
def test_share_keys_takes_the_mechanism(name):
    equal(attended(name, parallel.share_keys), attended(name))


@pytest.mark.parametrize("name", slow_but_for(["nystrom"], SHARED))
def test_lengths_of_shared_keys_count_all_tokens(name):
    lengths = jnp.asarray([TOKENS, 13])
    given = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    found = attended(name, parallel.share_keys, **given)
    equal(found, attended(name, **given))


def test_the_other_calls_are_tested_beside():
    """By the mixers in `test_modules`, and softmax and windows in `test_ring`."""
    tested = {
        "ring_attention": {"softmax", "sliding_window"},
        "pass_states": {*test_modules.STATES},
        "exchange_channels": {*test_modules.CHANNELS},
        "share_keys": {*test_modules.SHARED},
    }
    for call, names in tested.items():
        assert {name for name in CALLED if CALLED[name] == call} == names
    others = {n for n in CALLED if CALLED[n] == "exchange_heads"} - {*BY_HEADS}
    mixers = {
        "convolution_attention",
        "gated_attention",
        "latent",
        "mixture_of_mechanisms",
        "synthesizer_random",
    }
    assert others == mixers <= test_modules.HEADS.keys()


def shared(name, tokens=TOKENS, **options):
    """Numbers by collective that a device passes in a call of `share_keys`."""
    mesh = parallel.make_mesh(sequence=DEVICES, devices=jax.devices()[:DEVICES])
    function = functools.partial(registry.get(name).function, **OPTIONS[name], **options)
    run = jax.shard_map(
        parallel.share_keys(function, "sequence"),
        mesh=mesh,
        in_specs=(OF_TOKENS,) * 3,
        out_specs=OF_TOKENS,
    )
    place = NamedSharding(mesh, OF_TOKENS)
    arrays = [
        jax.ShapeDtypeStruct((1, tokens, heads, SIZE), jnp.float32, sharding=place)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    return moved(jax.jit(run).lower(*arrays).compile())


def test_compressed_keys_alone_are_sent():
    assert shared("linformer") == {"all-reduce": 4 * 2 * KEY_HEADS * SIZE}
    landmarks = 4
    assert shared("nystrom") == {
        "all-reduce": landmarks * (HEADS + KEY_HEADS) * SIZE,
        "all-gather": DEVICES * landmarks * HEADS * (SIZE + 1),
    }
    slots, summaries = TOKENS // 8 * 2, TOKENS // 4 * 2
    assert shared("block_linformer") == {"all-gather": slots * 2 * KEY_HEADS * SIZE}
    # With the logarithm of the weight of a summary.
    assert shared("hierarchical") == {"all-gather": summaries * KEY_HEADS * (2 * SIZE + 1)}


def test_what_cannot_share_keys_is_one_sentence():
    with pytest.raises(ValueError, match="the 9 tokens of each device must be whole blocks of 8"):
        shared("block_linformer", 36)
    with pytest.raises(ValueError, match="the 9 tokens of each device must be whole segments of 4"):
        shared("hierarchical", 36)
    with pytest.raises(ValueError, match=r"key_projection of shape \(4, 32\) is for at most 32"):
        shared("linformer", 64)
    with pytest.raises(ValueError, match="share_keys has no dropout, got dropout_rate"):
        shared("linformer", dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="share_keys takes .* got routing_attention; "):
        shared("routing", centroids=numbers(HEADS, 5, SIZE))
