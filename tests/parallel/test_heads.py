"""Sequence parallelism by exchange of heads: equal to one device, and what is moved."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import parallel
from effattn.testing.functions import assert_close
from tests.laws.sharding import collectives
from tests.marks import slow_but_for

pytestmark = pytest.mark.devices

BATCH, TOKENS, HEADS, SIZE = 2, 64, 8, 16
OF_TOKENS, OF_HEADS = P("data", "sequence"), P()
DRAW = np.random.default_rng(0)


def numbers(*shape):
    return jnp.asarray(DRAW.normal(size=shape), jnp.float32)


def by_distance(logit, b, h, i, j):
    return logit - (i - j) / (1 + h)


IDS = jnp.asarray([[1] * 30 + [2] * 20 + [3] * 10 + [0] * 4] * BATCH)
GATES = jax.nn.log_sigmoid(numbers(BATCH, TOKENS, HEADS, SIZE))
# Function, and options that are arrays, with their sharding.
CALLS = {
    "softmax": (functools.partial(effattn.dot_product_attention, is_causal=True), {}),
    "documents": (effattn.dot_product_attention, {"segment_ids": (IDS, OF_TOKENS)}),
    "lengths": (
        effattn.dot_product_attention,
        {"key_value_seq_lengths": (jnp.asarray([60, 33]), P("data"))},
    ),
    "sink": (effattn.dot_product_attention, {"sink": (numbers(HEADS), OF_HEADS)}),
    "score_mod": (
        functools.partial(effattn.dot_product_attention, is_causal=True, score_mod=by_distance),
        {},
    ),
    "bias of pairs": (
        functools.partial(effattn.dot_product_attention, is_causal=True),
        {"bias": (numbers(HEADS, TOKENS, TOKENS), OF_HEADS)},
    ),
    "mask of rows": (
        effattn.dot_product_attention,
        {"mask": (numbers(BATCH, 1, TOKENS, TOKENS) > -0.5, P("data"))},
    ),
    "linear": (functools.partial(effattn.linear_attention, is_causal=True), {}),
    "retention": (effattn.retention, {"log_decay": (-jnp.arange(1.0, 9) / 20, OF_HEADS)}),
    "decays by head": (effattn.retention, {}),
    "random blocks": (functools.partial(effattn.bigbird_attention, block_size=4), {}),
    "gated linear": (effattn.gated_linear_attention, {"log_decay": (GATES, OF_TOKENS)}),
    "delta rule": (
        effattn.delta_rule_attention,
        {"beta": (jax.nn.sigmoid(numbers(BATCH, TOKENS, HEADS)), OF_TOKENS)},
    ),
}


QUICK = "softmax", "documents", "lengths", "sink", "score_mod", "random blocks"


def both(name, key_heads=HEADS, devices=4):
    """The function of arrays on one device and on several, and the arrays."""
    function, options = CALLS[name]
    shapes = (HEADS, key_heads, key_heads, HEADS)
    arrays = [numbers(BATCH, TOKENS, heads, SIZE) / 2 for heads in shapes]
    mesh = parallel.make_mesh(data=-1, sequence=devices)
    specs = [OF_TOKENS] * 4 + [spec for _, spec in options.values()]
    names = list(options)

    def attend(function, query, key, value, cotangent, *more):
        given = dict(zip(names, more, strict=True))
        out, pull_back = jax.vjp(lambda *arrays: function(*arrays, **given), query, key, value)
        return out, pull_back(cotangent)

    there = functools.partial(attend, parallel.exchange_heads(function, "sequence"))
    sharded = jax.shard_map(
        there, mesh=mesh, in_specs=tuple(specs), out_specs=(OF_TOKENS, (OF_TOKENS,) * 3)
    )
    given = [*arrays, *(x for x, _ in options.values())]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    return functools.partial(attend, function), given, jax.jit(sharded), placed


@pytest.mark.parametrize("name", slow_but_for(QUICK, CALLS))
def test_several_devices_give_what_one_gives(name):
    alone, given, run, placed = both(name)
    assert_close(run(*placed), jax.jit(alone)(*given), 1e-5)


@pytest.mark.parametrize("key_heads", slow_but_for([], [1, 2, 4]))
@pytest.mark.parametrize("name", slow_but_for([], ["softmax", "linear"]))
def test_key_heads_are_repeated_where_there_are_fewer_than_devices(name, key_heads):
    alone, given, run, placed = both(name, key_heads)
    assert_close(run(*placed), jax.jit(alone)(*given), 1e-5)


class Attend(nnx.Module):
    def __call__(self, query, key, value):
        return effattn.dot_product_attention(query, key, value)


def test_a_module_of_query_key_and_value_is_a_function_over_heads():
    run = jax.shard_map(
        parallel.exchange_heads(Attend(), "sequence"),
        mesh=parallel.make_mesh(data=2, sequence=4),
        in_specs=(OF_TOKENS,) * 3,
        out_specs=OF_TOKENS,
    )
    arrays = [numbers(BATCH, TOKENS, HEADS, SIZE) for _ in range(3)]
    assert_close(jax.jit(run)(*arrays), effattn.dot_product_attention(*arrays), 1e-5)


def test_rotations_of_lsh_attention_are_those_of_all_heads():
    options = {"num_rounds": 2, "num_buckets": 4, "chunk_length": 8}
    attend = functools.partial(effattn.lsh_attention, **options, rng=jax.random.key(0))
    run = jax.shard_map(
        parallel.exchange_heads(attend, "sequence"),
        mesh=parallel.make_mesh(data=2, sequence=4),
        in_specs=(OF_TOKENS,) * 2,
        out_specs=OF_TOKENS,
    )
    arrays = [numbers(BATCH, TOKENS, HEADS, SIZE) for _ in range(2)]
    assert_close(jax.jit(run)(*arrays), attend(*arrays), 1e-5)


def test_bonus_of_fewer_key_heads_than_devices():
    """RWKV-6: the bonus of each key head goes with the repeated key heads."""
    mesh = parallel.make_mesh(data=2, sequence=4)
    sizes = HEADS, 2, 2, 2
    query, key, value, gate = (numbers(BATCH, TOKENS, heads, SIZE) for heads in sizes)
    bonus, gate = numbers(2, SIZE), jax.nn.log_sigmoid(gate)
    call = parallel.exchange_heads(effattn.rwkv6_attention, "sequence")
    run = jax.shard_map(
        lambda *arrays: call(*arrays[:3], log_decay=arrays[3], bonus=arrays[4]),
        mesh=mesh,
        in_specs=(OF_TOKENS,) * 4 + (OF_HEADS,),
        out_specs=OF_TOKENS,
    )
    right = effattn.rwkv6_attention(query, key, value, log_decay=gate, bonus=bonus)
    assert_close(jax.jit(run)(query, key, value, gate, bonus), right, 1e-5)


def moved(program):
    """Numbers that a device passes to each kind of collective."""
    found = {}
    for line in program.as_text().splitlines():
        if match := re.search(r"= (.*?) (all-[a-z-]+|collective-permute)(?:-start)?\(", line):
            shapes = re.findall(r"f32\[([\d,]*)\]", match[1])
            count = sum(math.prod(map(int, shape.split(","))) for shape in shapes)
            found[match[2]] = found.get(match[2], 0) + count
    return found


@pytest.mark.parametrize("devices", slow_but_for([8], [2, 8]))
def test_it_moves_four_times_the_activations_by_the_devices(devices):
    """Query, key, value and output forward; their gradients, and these again, backward."""
    function, _ = CALLS["softmax"]
    mesh = parallel.make_mesh(data=-1, sequence=devices)
    attend = parallel.exchange_heads(function, "sequence")
    run = jax.shard_map(attend, mesh=mesh, in_specs=(OF_TOKENS,) * 3, out_specs=OF_TOKENS)
    shape = (8 // devices, TOKENS, HEADS, SIZE)
    sharding = NamedSharding(mesh, OF_TOKENS)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)] * 3
    program = jax.jit(run).lower(*arrays).compile()
    # On each device: its examples, and its tokens.
    activations = math.prod(shape) // (8 // devices) // devices
    assert moved(program) == {"all-to-all": 4 * activations}
    assert set(collectives(program)) == {"all-to-all"}


def fails(message, heads=HEADS, key_heads=HEADS, function=effattn.dot_product_attention, **options):
    mesh = parallel.make_mesh(data=2, sequence=4)
    attend = parallel.exchange_heads(function, "sequence")
    run = jax.shard_map(
        lambda *arrays: attend(*arrays, **options),
        mesh=mesh,
        in_specs=(OF_TOKENS,) * 3,
        out_specs=OF_TOKENS,
    )
    arrays = [numbers(BATCH, TOKENS, count, SIZE) for count in (heads, key_heads, key_heads)]
    with pytest.raises(ValueError, match=message):
        run(*arrays)


@pytest.mark.parametrize("form", [parallel.exchange_heads, parallel.share_keys])
def test_a_name_is_no_function(form):
    with pytest.raises(
        ValueError, match="takes a function or a module, got 'softmax'; pass effattn"
    ):
        form("softmax", "sequence")


def test_what_cannot_be_exchanged_is_one_sentence():
    fails("the 4 devices of the mesh axis 'sequence' must divide the 2 heads of query", 2, 2)
    fails("key must have a number of heads that divides the 4 devices .* got 6", 12, 6)
    linear = effattn.linear_attention
    state = jnp.zeros((2, 8, SIZE, SIZE))
    fails("cannot divide the option 'initial_state'", function=linear, initial_state=state)
    fails("has no dropout, got dropout_rate; leave it out", dropout_rate=0.1)
    fails("has no dropout, got dropout_rng", dropout_rate=0.0, dropout_rng=jax.random.key(0))
    # Arrays of NumPy are arrays too.
    fails("cannot divide the option 'logit_mask'", logit_mask=np.ones(3))
    # Each device must have the rows of all tokens.
    fails("bias", bias=jnp.zeros((HEADS, TOKENS // 4, TOKENS)))
    dilated = functools.partial(effattn.sliding_window_attention, local_window_size=2)
    fails("needs one dilation for all heads", function=dilated, dilation=[1, 2] * 4)
    fails("beta must have shape", function=effattn.delta_rule_attention, beta=jnp.ones((2, 9, 8)))
    fails("return their output alone; leave out return_residual", return_residual=True)
