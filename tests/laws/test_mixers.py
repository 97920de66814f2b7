"""Laws of mixers without heads on cost, sharding, transformations and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.analysis import cost
from effattn.nn import SelfAttention
from effattn.testing import mixers
from effattn.testing.functions import assert_close, to_numpy
from effattn.testing.mixers import FEATURES, LENGTH, ROWS
from tests.cases import COST, TRANSFORMS
from tests.laws.battery import FIRST_MIXER_OF_FAMILY, FIRST_MIXERS, LAYERS, MIXERS_WITH_CORES
from tests.laws.sharding import collectives, mesh
from tests.marks import slow_but_for

EPS = float(np.finfo(np.float32).eps)

first = pytest.mark.parametrize("mixer", FIRST_MIXERS, ids=str)
of_cores = pytest.mark.parametrize("mixer", slow_but_for(MIXERS_WITH_CORES, FIRST_MIXERS), ids=str)
sharded = pytest.mark.parametrize("mixer", slow_but_for(FIRST_MIXER_OF_FAMILY, LAYERS), ids=str)
called = pytest.mark.parametrize("mixer", slow_but_for(MIXERS_WITH_CORES, LAYERS), ids=str)

close = functools.partial(assert_close, rtol=40 * EPS, least=1e-3)


def program_at(mixer, length, backward=True):
    """Traced program of one row of `length` tokens: forward, or forward and backward."""
    options = COST[mixer.name](length) if mixer.name in COST else {}
    module = jax.eval_shape(lambda: mixers.build(mixer, 16, 1, **options))
    x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    call = (lambda m, x: mixers.both(lambda m, x: m(x), m, x, x)) if backward else lambda m, x: m(x)
    return jax.jit(call).trace(module, x)


LENGTHS = (4096, 32768)


@of_cores
def test_memory_grows_as_claimed(mixer):
    """Temporary bytes of forward and backward together, in the compiled program."""
    found = [cost.temporary_bytes(program_at(mixer, length)) for length in LENGTHS]
    assert cost.exponent(LENGTHS, found) <= mixer.entry.memory_exponent + 0.1, found


@first
def test_costs_grow_as_claimed(mixer):
    """Counts operations of forward and backward; no array outgrows the claim on memory."""
    programs = [program_at(mixer, length) for length in LENGTHS]
    counts = [cost.operations(program.jaxpr) for program in programs]
    found = cost.exponent(LENGTHS, counts)
    assert abs(found - mixer.entry.time_exponent) <= 0.1, (found, counts)
    sizes = [cost.equations(program.jaxpr) for program in programs]
    assert max(sizes) <= 1.1 * min(sizes), sizes
    most = mixer.entry.memory_exponent + 0.1
    arrays = [cost.largest(program.jaxpr) for program in programs]
    assert cost.exponent(LENGTHS, arrays) <= most, arrays


@of_cores
def test_a_forward_call_alone_holds_no_more_than_claimed(mixer):
    """No array outgrows the claim on memory, and the number of arrays does not grow."""
    alone = [program_at(mixer, length, backward=False) for length in LENGTHS]
    arrays = [cost.largest(program.jaxpr) for program in alone]
    assert cost.exponent(LENGTHS, arrays) <= mixer.entry.memory_exponent + 0.1, arrays
    sizes = [cost.equations(program.jaxpr) for program in alone]
    assert max(sizes) <= 1.1 * min(sizes), sizes


@pytest.mark.devices
@sharded
def test_sharded_by_rows(mixer):
    """Only the gradients of parameters are summed, and the results are those of one device."""
    if mixer.name in TRANSFORMS and jax.__version_info__ < (0, 12):
        pytest.skip("before JAX 0.12 the compiler gathers sharded batches for Fourier transforms")
    devices = mesh()
    by_row = NamedSharding(devices, PartitionSpec("batch"))
    everywhere = NamedSharding(devices, PartitionSpec())
    module = mixers.cast(mixers.made(mixer), np.float32)
    x, cotangent = (mixers.tokens(seed).astype(np.float32) for seed in (1, 2))
    args = (
        jax.device_put(module, everywhere),
        *(jax.device_put(array, by_row) for array in (x, cotangent)),
    )
    shardings = by_row, (everywhere, by_row)
    call = jax.jit(lambda *args: mixers.run(*args, {}), out_shardings=shardings)
    compiled = call.lower(*args).compile()
    found = collectives(compiled)
    assert set(found) <= {"all-reduce"}, found
    assert len(found) <= len(jax.tree.leaves(module)), found
    close(compiled(*args), mixers.run_in_float32(mixer, x, cotangent))


@pytest.mark.devices
@called
def test_rows_stay_where_explicit_axes_have_them(mixer):
    """Only the types of outputs, gradients and states are checked; nothing is computed."""
    devices = mesh(AxisType.Explicit)
    x = jax.device_put(
        mixers.tokens(1).astype(np.float32), NamedSharding(devices, PartitionSpec("batch"))
    )

    def run(module, x):
        _, (_, gradient) = mixers.both(lambda m, x: m(x, **mixers.padding(mixer)), module, x, x)
        if not mixer.has("decode"):
            return gradient
        y, state = module.extend(x[:, :2], module.init_state(ROWS, LENGTH))
        return gradient, y, state, module.extend(x[:, 2:], state)

    with jax.set_mesh(devices):
        placed = jax.eval_shape(run, mixers.cast(mixers.made(mixer), np.float32), x)
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(placed)} == {"batch"}


@called
def test_scan_remat_and_vmap(mixer):
    """vmap over two sets of parameters, around a scan over examples with full rematerialisation."""
    module = mixers.cast(mixers.made(mixer), np.float32)
    halves = jax.tree.map(lambda p: np.stack([p, p / 2]), module)
    x, cotangent = (mixers.tokens(seed).astype(np.float32) for seed in (1, 2))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None), axis_size=2)
    def call(module, x, cotangent):
        def scanned(module, x):
            one = jax.checkpoint(lambda m, row: m(row[None])[0])
            return jax.lax.scan(lambda _, row: (None, one(module, row)), None, x)[1]

        return mixers.both(scanned, module, x, cotangent)

    got = to_numpy(call(halves, x, cotangent))
    for place, scale in enumerate((1, 2)):
        part = jax.tree.map(lambda p, scale=scale: p / scale, module)
        expected = mixers.run(part, x, cotangent, {})
        close(jax.tree.map(lambda leaf, place=place: leaf[place], got), expected)


@first
def test_what_is_not_claimed_is_refused_with_advice(mixer):
    variant = dict(mixer.case.variants[mixer.variant])

    def made(**options):
        options = {"is_causal": mixer.is_causal, **options}
        return mixer.entry.build(FEATURES, mixers.HEADS, rngs=nnx.Rngs(0), **variant, **options)

    def refused(call, match):
        """Checks the message by shapes; nothing is computed."""
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(call)

    x = np.ones((ROWS, LENGTH, FEATURES), np.float32)
    refusals = {
        "causal": lambda: made(is_causal=True),
        "bidirectional": lambda: made(is_causal=False),
        "dropout": lambda: made(dropout_rate=0.5),
        "lengths": lambda: made()(x, lengths=np.full(ROWS, 2)),
        "segments": lambda: made()(x, segment_ids=np.ones((ROWS, LENGTH), int)),
    }
    for capability, call in refusals.items():
        if not mixer.has(capability):
            refused(call, f"was given, but .* lacks '{capability}'")
    if mixer.has("lengths"):
        refused(lambda: made()(x, lengths=np.full(ROWS, 1.5)), "lengths must be integers")
    if mixer.has("segments"):
        ids = np.ones((ROWS, LENGTH), bool)
        refused(lambda: made()(x, segment_ids=ids), "segment_ids must be integers")
    refused(lambda: made()(x[..., :3]), r"x must have shape \(batch, length, 8\)")
    refused(
        lambda: SelfAttention(FEATURES, mixers.HEADS, mixer.name, rngs=nnx.Rngs(0)),
        f"attention must be a mechanism of query, key and value, got '{mixer.name}'; use",
    )
    if mixer.has("decode"):

        def extend(x, **options):
            return made(**options).extend(x, made().init_state(ROWS, LENGTH))

        def extend_another():
            wider = mixer.entry.build(2 * FEATURES, mixers.HEADS, rngs=nnx.Rngs(0), **variant)
            return made().extend(x, wider.init_state(ROWS, LENGTH))

        refused(lambda: made().extend(x, ()), "state must be the .* that init_state returned")
        refused(lambda: extend(x[:2]), "call init_state with batch=2")
        refused(lambda: made().step(x, made().init_state(ROWS, LENGTH)), "step takes one token")
        refused(lambda: made().init_state(-1, LENGTH), "batch must be an int, 0 or more rows")
        refused(lambda: made().init_state(ROWS, None), "max_length must be an int, 0 or more")
        for dtype in (np.int8, bool, np.complex64, jnp.float8_e5m2, "floaty"):
            begin = functools.partial(made().init_state, ROWS, LENGTH, dtype)
            refused(begin, "dtype of a decode state must be one of")
        refused(extend_another, "shape")
        if mixer.has("bidirectional"):
            refused(lambda: extend(x, is_causal=False), "cannot decode")
    else:
        assert not mixer.is_causal
