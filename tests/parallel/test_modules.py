"""Mixers by passed states and by exchanged channels: equal to one device, and what is moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import nn, parallel, registry
from effattn.testing.functions import assert_close
from effattn.testing.subjects import filled_at_random
from tests.marks import slow_but_for
from tests.parallel.test_heads import moved

pytestmark = pytest.mark.devices

BATCH, TOKENS, FEATURES, DEVICES = 2, 32, 16, 4
OF_TOKENS = P(None, "sequence")
ROTARY = nn.RotaryEmbedding(theta=100.0)
# Options of mixers by the form that takes them.
STATES = {
    "linear": {"rotary": ROTARY},
    "retention": {},
    "gated_linear": {},
    "lightning": {},
    "hgrn2": {},
    "mlstm": {"forget_gate": "exp"},
    "gated_slot": {"num_slots": 3},
    "luna": {"num_packed": 3, "rotary": ROTARY},
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4},
    "mamba3": {"state_size": 4, "mimo_rank": 2},
    "delta_net": {},
    "gated_delta_net": {},
    "delta_product": {},
    "kimi_delta": {},
    "gated_delta_net_2": {},
    "rwkv4": {},
    "rg_lru": {},
    "rwkv6": {},
    "mesa": {"num_steps": 5},
    "rwkv7": {},
    "aft_simple": {},
    "s4d": {"state_size": 4},
    "h3": {"state_size": 4, "head_dim": 2},
    "s5": {"state_size": 4},
    "convolution": {"width": 4, "dilation": 2},
    "bidirectional": {"mixer": {"name": "mamba", "state_size": 4}, "is_causal": False},
    "lstm": {},
    "slstm": {},
    "gru": {},
    "recurrent_memory": {"segment_size": 4, "num_slots": 2, "rotary": ROTARY},
    "transformer_xl": {"segment_size": 4, "memory_size": 3},
    "mega": {"chunk_length": 4, "ema_dim": 3, "shared_dim": 4, "value_dim": 6},
    "compressive": {"segment_size": 2, "memory_size": 2, "num_slots": 2, "compression_rate": 2},
}
CHANNELS = {
    "hyena": {"max_length": TOKENS, "filter_features": 5, "frequency": 1.0},
    "long_convolution": {"max_length": TOKENS},
    "s4": {"max_length": 24, "state_size": 4},
    "gmlp": {"max_length": TOKENS + 1, "hidden_features": 16},
    "aft_full": {"max_length": TOKENS, "rank": 3},
    "aft_local": {"max_length": TOKENS, "rank": 3, "local_window_size": 9},
    "aft_conv": {"local_window_size": 9},
    "fnet": {},
}
HEADS = {
    "softmax": {"rotary": ROTARY},
    "sliding_window": {"local_window_size": 9, "num_kv_heads": 2},
    "convolution_attention": {"width": 3, "rotary": ROTARY},
    "delta_net": {},
    "gated_delta_net": {},
    "delta_product": {},
    "gated_linear": {},
    "linear": {},
    "additive": {},
    "forgetting": {},
    "titans": {"mini_batch_size": 4},
    "ttt_linear": {"mini_batch_size": 4},
    "log_linear": {"num_levels": 4},
    "path": {"rank": 4},
    "differential": {"rotary": ROTARY},
    "gated_attention": {"rotary": ROTARY},
    "latent": {"rotary": ROTARY, "query_rank": 8},
    "based": {},
    "hedgehog": {},
    "performer": {},
    "random_features": {},
    "block_linformer": {"block_size": 4, "num_projected": 2},
    "linformer": {"max_length": TOKENS, "num_projected": 4, "is_causal": False},
    "long_short": {"window_size": 3, "segment_size": 4, "num_projected": 2},
    "longformer": {
        "local_window_size": 9,
        "global_tokens": 3,
        "max_global": 9,
        "global_projections": True,
        "rotary": ROTARY,
    },
    "adaptive_span": {"max_span": 9, "ramp": 4.0},
    "learned_blocks": {"block_size": 4, "top_k": 3},
    "selective": {"rotary": ROTARY},
    "streaming": {
        "num_sinks": 2,
        "window_size": 9,
        "positions_in_cache": True,
        "rotary": ROTARY,
    },
    "infini": {"segment_size": 4, "rotary": ROTARY},
    "lsh": {"num_rounds": 2, "num_buckets": 4, "chunk_length": 4, "rotary": ROTARY},
    "bigbird": {"block_size": 4, "num_random_blocks": 2},
    "native_sparse": {"compression_size": 4, "compression_stride": 2, "block_size": 4},
    "sinkhorn": {"max_length": 40, "block_size": 8, "is_causal": False},
    "routing": {"heads": 8, "num_clusters": 4, "cluster_size": 8, "rotary": ROTARY},
    "mixture_of_mechanisms": {"mechanisms": ("softmax", "linear")},
    "synthesizer": {"max_length": 40},
    "synthesizer_factorized": {"max_length": 40},
    "synthesizer_factorized_random": {"max_length": 40},
    "synthesizer_mixture": {"max_length": TOKENS},
    "synthesizer_random": {"max_length": 40},
}
SHARED = {
    "linformer": HEADS["linformer"],
    "block_linformer": HEADS["block_linformer"],
    "hierarchical": {"segment_size": 4, "num_summaries": 2, "rotary": ROTARY},
    "nystrom": {"num_landmarks": 4, "is_causal": False},
    "indexed": {"top_k": 7, "rotary": ROTARY},
    "talking_heads": {"num_softmaxes": 3, "rotary": ROTARY},
    "inducing_points": {"num_points": 3, "is_causal": False},
}
# A document begins a segment of recurrent memory, wherever it is in a row.
OF_DOCUMENTS = [
    name
    for name in STATES
    if "segments" in registry.get(name).capabilities and name != "recurrent_memory"
]
# Documents that end within a device and at its edge, that cover a device, and paddings.
IDS = np.array(
    [
        [1] * 8 + [2] * 5 + [0] * 3 + [3] * 13 + [4] * 3,
        [0] * 3 + [7] * 20 + [0] + [8] * 8,
    ]
)
LENGTHS = np.array([32, 13])


def made(name, heads=2, **options):
    def build():
        return registry.get(name).build(FEATURES, heads, rngs=nnx.Rngs(0), **options)

    return filled_at_random(build)


def tokens(seed):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(BATCH, TOKENS, FEATURES)), jnp.float32)


def program(module, form=None, **padding):
    """Output and gradients of the module and its tokens, on one device or on several."""

    def run(module, x, cotangent, given):
        def call(module, x):
            call = module if form is None else form(module, "sequence")
            return call(x, **given)

        out, pull_back = jax.vjp(call, module, x)
        return out, pull_back(cotangent)

    given = {name: jnp.asarray(x, jnp.int32) for name, x in padding.items()}
    arrays = module, tokens(0), tokens(1), given
    if form is None:
        return jax.jit(run)(*arrays)
    mesh = parallel.make_mesh(sequence=DEVICES, devices=jax.devices()[:DEVICES])
    specs = {"segment_ids": OF_TOKENS, "lengths": P()}
    of_given = {name: specs[name] for name in given}
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(), OF_TOKENS, OF_TOKENS, of_given),
        out_specs=(OF_TOKENS, (P(), OF_TOKENS)),
    )
    return jax.jit(sharded)(*arrays)


def check(name, form, options, **padding):
    module = made(name, **options)
    found, right = program(module, form, **padding), program(module, **padding)
    assert_close(found[0], right[0], 1e-5)
    assert_close(found[1], right[1], 1e-4)


@pytest.mark.parametrize("name", slow_but_for(["convolution", "recurrent_memory"], STATES))
def test_mixers_pass_states(name):
    check(name, parallel.pass_states, STATES[name])


@pytest.mark.parametrize("name", slow_but_for(["mamba", "rwkv4"], [*OF_DOCUMENTS]))
def test_documents_cross_devices(name):
    check(name, parallel.pass_states, STATES[name], segment_ids=IDS)


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(nn.ShortConvolution, width=3),
        pytest.param(nn.RWKV4ChannelMix, marks=pytest.mark.slow),
        pytest.param(nn.RWKV7ChannelMix, marks=pytest.mark.slow),
    ],
    ids=["short convolution", "channel mixing", "channel mixing of RWKV-7"],
)
def test_layers_that_read_the_last_tokens(build):
    module = filled_at_random(lambda: build(FEATURES, rngs=nnx.Rngs(0)))
    given = {"segment_ids": IDS, "lengths": LENGTHS}
    found, right = (program(module, form, **given) for form in (parallel.pass_states, None))
    assert_close(found[0], right[0], 1e-5)
    assert_close(found[1], right[1], 1e-4)


@pytest.mark.parametrize("name", slow_but_for(["lstm"], ["lstm", "slstm", "gru"]))
@pytest.mark.parametrize("padding", [{"segment_ids": IDS}, {"lengths": LENGTHS}], ids="".join)
def test_cells_in_both_directions(name, padding):
    check(name, parallel.pass_states, {"is_causal": False}, **padding)


@pytest.mark.parametrize("name", slow_but_for([], STATES))
def test_lengths_count_all_tokens(name):
    check(name, parallel.pass_states, STATES[name], lengths=LENGTHS)


@pytest.mark.parametrize("name", slow_but_for(["fnet"], CHANNELS))
def test_mixers_exchange_channels(name):
    check(name, parallel.exchange_channels, CHANNELS[name])


@pytest.mark.parametrize("name", slow_but_for(["hyena"], [n for n in CHANNELS if n != "fnet"]))
def test_lengths_count_all_tokens_of_channels(name):
    check(name, parallel.exchange_channels, CHANNELS[name], lengths=LENGTHS)


@pytest.mark.parametrize("name", slow_but_for(["convolution_attention", "lsh"], HEADS))
def test_mixers_exchange_heads(name):
    check(name, parallel.exchange_heads, {"heads": 4, **HEADS[name]})


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        ["longformer"],
        ["softmax", "convolution_attention", "delta_net", "lsh", "routing", "synthesizer"],
    ),
)
def test_documents_of_exchanged_heads(name):
    options = {"heads": 4, **HEADS[name]}
    check(name, parallel.exchange_heads, options, segment_ids=IDS, lengths=LENGTHS)


def test_convolutions_read_both_neighbours():
    options = {"heads": 4, "width": 4, "combination": "sum", "is_causal": False}
    given = {"segment_ids": IDS, "lengths": LENGTHS}
    check("convolution_attention", parallel.exchange_heads, options, **given)


LINEAR_OR_EXACT = ("linear", "softmax", {"name": "softmax", "num_kv_heads": 2})


@pytest.mark.parametrize(
    ("mechanisms", "padding"),
    [
        (LINEAR_OR_EXACT, {"segment_ids": IDS}),
        pytest.param(("sliding_window", "softmax"), {"lengths": LENGTHS}, marks=pytest.mark.slow),
    ],
    ids=["documents", "lengths"],
)
def test_tokens_of_all_devices_take_the_places_of_a_mixture(mechanisms, padding):
    options = {"mechanisms": mechanisms, "gate": "top1", "capacity": 0.4, "rotary": ROTARY}
    module = made("mixture_of_mechanisms", 4, **options)
    chosen = module.token_costs(tokens(0), **{k: jnp.asarray(x) for k, x in padding.items()})
    assert 4 < (chosen > 0).sum() < 32
    check("mixture_of_mechanisms", parallel.exchange_heads, {"heads": 4, **options}, **padding)


@pytest.mark.parametrize("name", slow_but_for([], SHARED))
def test_mixers_share_keys(name):
    check(name, parallel.share_keys, SHARED[name], lengths=LENGTHS)


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("mixture_of_mechanisms", parallel.pass_states, "got MixtureOfMechanisms; exchange_heads"),
        ("gru", parallel.exchange_channels, "got GRU; pass_states takes recurrences"),
        ("softmax", parallel.pass_states, "got SelfAttention; exchange_heads takes any function"),
        ("convolution_attention", parallel.pass_states, "got ConvolutionAttention; "),
        ("aft_full", parallel.pass_states, "got attention_free with position_bias"),
        ("mamba", parallel.exchange_channels, "got Mamba; pass_states takes recurrences"),
        ("rwkv6", parallel.exchange_heads, "got RWKV6; pass the function of its mechanism"),
    ],
)
def test_other_modules_are_refused(name, form, message):
    options = {"max_length": TOKENS} if name == "aft_full" else {}
    with pytest.raises(ValueError, match=message):
        program(made(name, **options), form)


def test_groups_of_heads_are_refused():
    """Also where a function over heads would be taken: their tokens are not heads."""
    groups = [{"name": name, "num_heads": 2} for name in ("softmax", "linear")]
    module = nn.HybridHeads(FEATURES, 4, groups, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="got HybridHeads; pass the function of its mechanism"):
        program(module, parallel.exchange_heads)


def test_what_does_not_fit_is_one_sentence():
    long = {"width": 9, "dilation": 2}
    with pytest.raises(ValueError, match="at least the 16 tokens that a token reads .* got 8; "):
        program(made("convolution", **long), parallel.pass_states)
    short = {"max_length": TOKENS - 1, "filter_features": 5}
    with pytest.raises(ValueError, match="x has 32 tokens, but this Hyena has parameters for"):
        program(made("hyena", **short), parallel.exchange_channels)
    with pytest.raises(ValueError, match="exchange_channels has no segment_ids; leave it out"):
        program(made("aft_simple"), parallel.exchange_channels, segment_ids=IDS)
    weights, bias = jnp.ones((TOKENS, TOKENS)), jnp.ones(TOKENS)
    call = functools.partial(effattn.spatial_gating, weights=weights, bias=bias)
    run = jax.shard_map(
        lambda gate, value: parallel.exchange_channels(call, "sequence")(gate, value),
        mesh=parallel.make_mesh(data=2, sequence=4),
        in_specs=(OF_TOKENS,) * 2,
        out_specs=OF_TOKENS,
    )
    with pytest.raises(ValueError, match="must divide the 6 channels of gate"):
        run(*[jnp.ones((1, TOKENS, 6))] * 2)


def traffic(module, form, tokens):
    mesh = parallel.make_mesh(data=2, sequence=DEVICES)
    call = jax.shard_map(
        lambda module, x: form(module, "sequence")(x),
        mesh=mesh,
        in_specs=(P(), P("data", "sequence")),
        out_specs=P("data", "sequence"),
    )
    place = NamedSharding(mesh, P("data", "sequence"))
    x = jax.ShapeDtypeStruct((2, tokens, FEATURES), jnp.float32, sharding=place)
    return moved(jax.jit(call).lower(module, x).compile())


def test_states_and_last_tokens_pass_whatever_the_length():
    module = made("mamba", **STATES["mamba"])
    short, long = (traffic(module, parallel.pass_states, tokens) for tokens in (32, 256))
    states = DEVICES * 2 * module.state_size * 2 * FEATURES  # a decay for each entry of a state
    of_convolution = 3 * 2 * FEATURES
    assert short == long == {"all-gather": states, "collective-permute": of_convolution}
    module = made("convolution", **STATES["convolution"])
    assert traffic(module, parallel.pass_states, 64) == {"collective-permute": 6 * FEATURES}


def test_a_hyena_moves_its_gates_value_and_output():
    module = made("hyena", **CHANNELS["hyena"])
    part = TOKENS // DEVICES * FEATURES
    found = traffic(module, parallel.exchange_channels, TOKENS)
    assert found == {"all-to-all": (2 + 1 + 1) * part, "collective-permute": 2 * 3 * FEATURES}
