"""Recurrences by passed states: equal to one device, and what is moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import parallel
from effattn.cores.weighted_sums import Sums
from effattn.testing.functions import assert_close
from tests.marks import slow_but_for
from tests.parallel.test_heads import moved

pytestmark = pytest.mark.devices

BATCH, TOKENS, HEADS, SIZE = 2, 96, 2, 16
OF_TOKENS = P("data", "sequence")
RNG = np.random.default_rng(0)


def numbers(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)


def decays(*shape):
    return jax.nn.log_sigmoid(3 + numbers(*shape))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


QUERY, KEY, VALUE, COTANGENT = (numbers(BATCH, TOKENS, HEADS, SIZE) for _ in range(4))
BY_HEAD, BY_FEATURE = (BATCH, TOKENS, HEADS), (BATCH, TOKENS, HEADS, SIZE)
STATE = numbers(BATCH, HEADS, SIZE, SIZE)
MESA = effattn.MesaState(STATE @ STATE.swapaxes(-1, -2), STATE)
# Function, options that tokens have, and other options.
CALLS = {
    "linear": (functools.partial(effattn.linear_attention, is_causal=True), {}, {}),
    "sums": (
        functools.partial(effattn.linear_attention, is_causal=True, normalize=False),
        {},
        {"initial_state": STATE},
    ),
    "retention": (effattn.retention, {}, {"initial_state": STATE}),
    "gated linear": (
        effattn.gated_linear_attention,
        {"log_decay": decays(*BY_FEATURE)},
        {"initial_state": STATE},
    ),
    "Mamba-2": (
        effattn.state_space_duality,
        {"step_size": jax.nn.softplus(numbers(*BY_HEAD))},
        {"rate": jnp.asarray([-0.2, -0.1])},
    ),
    "mLSTM": (
        effattn.mlstm_attention,
        {"log_input_gate": 4 * numbers(*BY_HEAD), "log_forget_gate": decays(*BY_HEAD)},
        {
            "initial_state": effattn.MLSTMState(
                numbers(BATCH, HEADS, SIZE, SIZE + 1), numbers(BATCH, HEADS)
            )
        },
    ),
    "Luna": (
        functools.partial(effattn.luna_attention, is_causal=True),
        {"pack_key": 4 * KEY},
        {
            "pack_query": numbers(HEADS, 3, SIZE),
            "initial_state": effattn.LunaState(
                numbers(BATCH, HEADS, SIZE, 3),
                numbers(BATCH, HEADS, 3, SIZE),
                1 + numbers(BATCH, HEADS, 3) ** 2,
                numbers(BATCH, HEADS, 3),
            ),
        },
    ),
    "delta rule": (
        effattn.delta_rule_attention,
        {"beta": jax.nn.sigmoid(numbers(*BY_HEAD))},
        {"initial_state": STATE},
    ),
    "gated delta rule": (
        effattn.delta_rule_attention,
        {"beta": jax.nn.sigmoid(numbers(*BY_HEAD)), "log_decay": decays(*BY_HEAD)},
        {},
    ),
    "mesa": (
        functools.partial(effattn.mesa_attention, num_steps=5),
        {"beta": jax.nn.sigmoid(numbers(*BY_HEAD)), "log_decay": decays(*BY_HEAD)},
        {"regulariser": jnp.ones((HEADS, SIZE)), "initial_state": MESA},
    ),
    "RWKV-6": (
        effattn.rwkv6_attention,
        {"log_decay": decays(*BY_FEATURE)},
        {"bonus": numbers(HEADS, SIZE), "initial_state": STATE},
    ),
    "RWKV-7": (
        effattn.rwkv7_attention,
        {
            "log_decay": decays(*BY_FEATURE),
            "removal_key": unit(numbers(*BY_FEATURE)),
            "learning_rate": jax.nn.sigmoid(numbers(*BY_FEATURE)),
        },
        {"initial_state": STATE},
    ),
    "Mamba": (
        effattn.selective_scan,
        {"step_size": jax.nn.softplus(numbers(*BY_FEATURE))},
        {
            "rate": -jnp.exp(numbers(HEADS, SIZE, SIZE)),
            "skip": numbers(HEADS, SIZE),
            "initial_state": STATE,
        },
    ),
}
# Mechanisms without heads.
X, Y, GATE, OF_FLAT = (numbers(BATCH, TOKENS, SIZE) for _ in range(4))
MODES = jnp.exp(1j * numbers(SIZE, 4)) * numbers(SIZE, 4)
S4D = {
    "rate": -0.1 - jnp.abs(MODES.real) + 1j * MODES.imag,
    "output": MODES,
    "step_size": jnp.full(SIZE, 0.1),
    "initial_state": MODES[None] * jnp.arange(1.0, BATCH + 1)[:, None, None],
}
SUMS = Sums(numbers(BATCH, SIZE), 1 + numbers(BATCH, SIZE) ** 2, numbers(BATCH, SIZE))
FLAT = {
    "S4D": (effattn.s4_convolution, {"x": X}, S4D),
    "S4D by recurrence": (
        functools.partial(effattn.s4_convolution, method="recurrence"),
        {"x": X},
        S4D,
    ),
    "RWKV-4": (
        effattn.rwkv4_mixing,
        {"key": X, "value": Y},
        # Gradients of a decay near 0 are sums that cancel.
        {"decay": 0.2 + jnp.abs(numbers(SIZE)), "bonus": numbers(SIZE), "initial_state": SUMS},
    ),
    "AFT-simple": (
        functools.partial(effattn.attention_free, is_causal=True),
        {"query": GATE, "key": X, "value": Y},
        {"initial_state": SUMS},
    ),
}


def program(function, mesh=None):
    """Output, state and gradients of everything, on one device or on the devices of a mesh."""

    def run(of_tokens, others, cotangent):
        def call(of_tokens, others):
            return function(**of_tokens, **others, return_state=True)

        (out, state), pull_back = jax.vjp(call, of_tokens, others)
        gradients, of_others = pull_back((cotangent, jax.tree.map(jnp.cos, state)))
        return out, state, gradients, of_others

    if mesh is None:
        return jax.jit(run)

    def on_device(of_tokens, others, cotangent):
        passed = parallel.pass_states(function, "sequence")

        def call(of_tokens, others):
            return passed(**of_tokens, **others, return_state=True)

        others = jax.tree.map(
            lambda x: jax.lax.pcast(x, ("data", "sequence"), to="varying"), others
        )
        (out, state), pull_back = jax.vjp(call, of_tokens, others)
        # Every device has the state; one of them counts its cotangent.
        first = jax.lax.axis_index("sequence") == 0
        counted = jax.tree.map(lambda x: jnp.where(first, jnp.cos(x), 0), state)
        gradients, of_others = pull_back((cotangent, counted))
        state, of_others = jax.tree.map(lambda x: x[None], (state, of_others))
        return out, state, gradients, of_others

    each = P("sequence", "data")
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(OF_TOKENS, P(), OF_TOKENS),
            out_specs=(OF_TOKENS, each, OF_TOKENS, P(("sequence", "data"))),
        )
    )


def arrays_of(name):
    if name in FLAT:
        return FLAT[name]
    function, of_tokens, others = CALLS[name]
    key = unit(KEY) if "delta" in name else KEY
    return function, {"query": QUERY, "key": key, "value": VALUE, **of_tokens}, others


QUICK = "linear", "delta rule", "Mamba", "S4D", "RWKV-4"


@pytest.mark.parametrize("name", slow_but_for(QUICK, [*CALLS, *FLAT]))
def test_several_devices_give_what_one_gives(name):
    """All examples are on each device, as states and shared arguments are those of examples."""
    function, of_tokens, others = arrays_of(name)
    mesh = parallel.make_mesh(data=1, sequence=4, devices=jax.devices()[:4])
    place = NamedSharding(mesh, OF_TOKENS)
    cotangent = OF_FLAT if name in FLAT else COTANGENT
    there = jax.device_put(of_tokens, place), others, jax.device_put(cotangent, place)
    out, states, gradients, of_others = program(function, mesh)(*there)
    right = program(function)(of_tokens, others, cotangent)
    assert_close((out, gradients), (right[0], right[2]), 2e-5)
    for device in range(4):
        assert_close(jax.tree.map(lambda x, n=device: x[n], states), right[1], 2e-5)
    summed = jax.tree.map(lambda x: x.sum(0), of_others)
    assert_close(summed, right[3], 1e-4)


# Documents of 96 tokens on 4 devices: one ends at a device's edge, one covers a device, paddings
# are within a row, at the start of a device and of the row.
IDS = jnp.asarray(
    [
        [1] * 24 + [2] * 20 + [0] * 8 + [3] * 36 + [4] * 8,
        [0] * 30 + [7] * 40 + [0] * 2 + [8] * 24,
    ],
    jnp.int32,
)


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        ["retention"], ["linear", "retention", "gated linear", "Luna", "delta rule", "RWKV-6"]
    ),
)
def test_documents_that_cross_devices(name):
    function, of_tokens, others = arrays_of(name)
    others = {k: x for k, x in others.items() if k != "initial_state"}
    mesh = parallel.make_mesh(data=1, sequence=4, devices=jax.devices()[:4])
    names = list(of_tokens)

    def call(function, *arrays):
        *arrays, ids, cotangent = arrays

        def attend(*arrays):
            given = dict(zip(names, arrays, strict=True))
            return function(**given, **others, segment_ids=ids, return_state=True)

        (out, state), pull_back = jax.vjp(attend, *arrays)
        return out, pull_back((cotangent, jax.tree.map(jnp.zeros_like, state)))

    there = functools.partial(call, parallel.pass_states(function, "sequence"))
    specs = (OF_TOKENS,) * (len(names) + 2)
    out_specs = OF_TOKENS, (OF_TOKENS,) * len(names)
    run = jax.shard_map(there, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    arrays = *of_tokens.values(), IDS, COTANGENT
    assert_close(jax.jit(run)(*arrays), jax.jit(functools.partial(call, function))(*arrays), 2e-5)


def test_a_document_crosses_devices_behind_one_of_far_larger_keys():
    """The weights of the second document do not underflow beside those of the first."""
    ids = jnp.where(jnp.arange(TOKENS) < 30, 1, 2)[None] * jnp.ones((BATCH, 1), jnp.int32)
    key = X + jnp.where(ids == 1, 100, -50)[..., None]
    decay, bonus = jnp.abs(MODES.real[:, 0]), MODES.imag[:, 0]
    mix = functools.partial(effattn.rwkv4_mixing, decay=decay, bonus=bonus)
    run = jax.shard_map(
        lambda key, value, ids: parallel.pass_states(mix, "sequence")(key, value, segment_ids=ids),
        mesh=parallel.make_mesh(data=2, sequence=4),
        in_specs=OF_TOKENS,
        out_specs=OF_TOKENS,
    )
    right = jax.jit(mix)(key, Y, segment_ids=ids)
    assert_close(jax.jit(run)(key, Y, ids), right, 1e-5)


def passed(function, devices, **options):
    mesh = parallel.make_mesh(data=2, sequence=-1, devices=jax.devices()[: 2 * devices])
    call = parallel.pass_states(function, "sequence")
    run = jax.shard_map(
        lambda *arrays: call(*arrays, **options),
        mesh=mesh,
        in_specs=(OF_TOKENS,) * 3,
        out_specs=OF_TOKENS,
    )
    return jax.jit(run), NamedSharding(mesh, OF_TOKENS)


def test_lengths_count_all_tokens():
    options = {"is_causal": True, "key_value_seq_lengths": jnp.asarray([60, 60])}
    lengths = options["key_value_seq_lengths"][:1]
    run, _ = passed(effattn.linear_attention, 4, is_causal=True, key_value_seq_lengths=lengths)
    assert_close(
        run(QUERY, KEY, VALUE), effattn.linear_attention(QUERY, KEY, VALUE, **options), 1e-5
    )


@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_a_device_gets_one_state_from_each_device_whatever_the_length(devices):
    found = []
    for tokens in (64, 1024):
        run, sharding = passed(effattn.retention, devices)
        shape = jax.ShapeDtypeStruct((2, tokens, HEADS, SIZE), jnp.float32, sharding=sharding)
        found.append(moved(run.lower(*[shape] * 3).compile()))
    # A state of each head, and its decay.
    assert found[0] == found[1] == {"all-gather": devices * HEADS * (SIZE * SIZE + 1)}


@pytest.mark.parametrize(
    ("function", "options", "name"),
    [
        (effattn.dot_product_attention, {}, "dot_product_attention"),
        (effattn.linear_attention, {}, "linear_attention without is_causal=True"),
        (
            effattn.performer_attention,
            {"is_causal": True, "projection": np.ones((1, 8, SIZE), np.float32)},
            "performer_attention",
        ),
        (
            effattn.cosformer_attention,
            {"is_causal": True, "max_length": TOKENS},
            "cosformer_attention",
        ),
        (effattn.based_attention, {"is_causal": True}, "based_attention"),
        (lambda query, key, value: value, {}, "<lambda>"),
    ],
    ids=["softmax", "bidirectional", "Performer", "cosFormer", "Based", "none"],
)
def test_other_functions_are_refused(function, options, name):
    run, _ = passed(function, 4, **options)
    with pytest.raises(ValueError, match=f"pass_states takes .*got {name}; "):
        run(QUERY, KEY, VALUE)
