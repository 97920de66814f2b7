"""The laws, of mechanisms that take no heads: a mixer's tokens, gradients and parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn import registry
from effattn.nn import SelfAttention
from tests.laws import cost, mixers
from tests.laws.mixers import (
    FEATURES,
    FIRST,
    FIRST_OF_FAMILY,
    LAYERS,
    LENGTH,
    ROWS,
    SUBJECTS,
    WITH_CORES,
    rms,
)
from tests.laws.rows import assert_rows_can_be_chosen
from tests.laws.sharding import collectives, mesh
from tests.marks import slow_but_for
from tests.references import MIXERS

EPS = float(np.finfo(np.float32).eps)
SEEDS = 8

# Sequences that are longer than the parameters of a mixer speak of.
LONGER = [s for s in SUBJECTS if s.variant == "longer"]
# The first variant of each, in its first direction; of one of each family, in both.
QUICK = [s for s in SUBJECTS if s in FIRST or s._replace(is_causal=True) in FIRST_OF_FAMILY]
QUICK += LONGER

every = pytest.mark.parametrize("mixer", slow_but_for(QUICK, SUBJECTS), ids=str)
first = pytest.mark.parametrize("mixer", FIRST, ids=str)
one_of_families = pytest.mark.parametrize("mixer", slow_but_for(FIRST_OF_FAMILY, FIRST), ids=str)
of_cores = pytest.mark.parametrize("mixer", slow_but_for(WITH_CORES, FIRST), ids=str)
sharded = pytest.mark.parametrize("mixer", slow_but_for(FIRST_OF_FAMILY, LAYERS), ids=str)
called = pytest.mark.parametrize("mixer", slow_but_for(WITH_CORES, LAYERS), ids=str)
causal = pytest.mark.parametrize("mixer", [s for s in FIRST if s.is_causal], ids=str)


def claiming(capability, subjects=SUBJECTS, quick=QUICK):
    claim = [s for s in subjects if s.has(capability)]
    return pytest.mark.parametrize("mixer", slow_but_for(quick, claim), ids=str)


def close(ours, expected, tolerance):
    """Equal to `tolerance` of each array's largest entry."""
    for (path, a), b in zip(
        jax.tree.leaves_with_path(mixers.to_numpy(ours)),
        jax.tree.leaves(mixers.to_numpy(expected)),
        strict=True,
    ):
        size = np.abs(b).max(initial=1e-3)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * size, err_msg=jax.tree_util.keystr(path)
        )


def test_every_mixer_has_a_reference_and_none_is_left_over():
    assert set(MIXERS) == {n for n in registry.names() if not registry.get(n).takes_heads}


# Law 1, and 4: pieces cut the sequence here, and not in the plain form.


@every
def test_float64_agrees(mixer):
    """Outputs, and the gradients of tokens and parameters."""
    with jax.enable_x64(True):
        x, cotangent = mixers.tokens(1), mixers.tokens(2)
        ours = mixers.run(mixers.made(mixer, tuned=True), x, cotangent, mixers.padding(mixer))
        expected = mixers.refer(mixer.name, mixers.made(mixer), x, cotangent)
        expected = mixers.to_numpy(expected)
        leaves = jax.tree.leaves_with_path(expected)
        for path, gradient in leaves:
            drawn = any(name in jax.tree_util.keystr(path) for name in mixer.reference.drawn)
            assert np.any(gradient) != drawn, path
        close(ours, expected, 1e-10)


@of_cores
def test_float32_errs_at_most_twice_as_much_as_the_plain_form(mixer):
    """Of outputs and all gradients."""
    module = mixers.made(mixer)
    runs = []
    for seed in range(SEEDS):
        x, cotangent = mixers.tokens(2 * seed), mixers.tokens(2 * seed + 1)
        with jax.enable_x64(True):
            true = mixers.to_numpy(mixers.refer(mixer.name, module, x, cotangent))
        narrow = (mixers.cast(a, np.float32) for a in (module, x, cotangent))
        plain = mixers.to_numpy(mixers.refer(mixer.name, *narrow))
        runs.append((mixers.run_in_float32(mixer, x, cotangent), plain, true))
    ours, plain, true = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    for (path, a), b, exact in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(plain), jax.tree.leaves(true), strict=True
    ):
        # Where the plain form is all but exact, an eps or two are allowed.
        allowed = max(2 * rms(b - exact), 4 * EPS * rms(exact))
        assert rms(a - exact) <= allowed, (jax.tree_util.keystr(path), rms(a - exact), allowed)


@of_cores
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_form(mixer):
    """Of the outputs."""
    module, reference = mixers.made(mixer, narrow=True), MIXERS[mixer.name]
    wide = mixers.cast(mixers.made(mixer, narrow=True, dtype=jnp.bfloat16), np.float32)
    call = jax.jit(lambda m, x: m(x))
    refer = jax.jit(lambda m, x: jax.vmap(lambda row: reference.mix(m, row))(x))
    runs = []
    for seed in range(SEEDS):
        x = mixers.tokens(seed)
        with jax.enable_x64(True):
            exact = np.asarray(refer(module, x))
        y = call(wide, x.astype(jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        plain = refer(*mixers.cast((module, x), jnp.bfloat16))
        runs.append((y - exact, plain - exact, exact))
    error, of_plain, exact = map(rms, map(np.stack, zip(*runs, strict=True)))
    assert error <= max(2 * of_plain, 0.005 * exact) < 0.1 * exact


# Law 2.


@causal
def test_nothing_reaches_back(mixer):
    """A token changes nothing before it, and no output's gradient reaches a later token."""
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    before, (_, whole) = mixers.run_in_float32(mixer, x, cotangent)
    exact = mixer.entry.causality == "exact"
    for token in (1, 6, LENGTH - 1):
        changed = np.where(np.arange(LENGTH)[:, None] < token, x, mixers.tokens(3))
        cut = np.where(np.arange(LENGTH)[:, None] < token, cotangent, 0)
        after, (_, gradient) = mixers.run_in_float32(mixer, changed, cut)
        change = np.abs(after - before).max(-1)
        assert change[:, :token].max() <= (0 if exact else 1e-5 * rms(before))
        assert (change[:, token] > 0).any()
        assert np.abs(gradient[:, token:]).max() <= (0 if exact else 1e-5 * rms(whole))
        assert np.any(gradient[:, :token])


# Law 3.


@claiming("decode", [s for s in FIRST + LONGER if s.is_causal])
def test_any_split_equals_the_whole(mixer):
    """Pieces of 0 to 4 tokens, other ones for each row, with NaN after each row's own."""
    rows, most = 2, 4
    module = mixers.cast(mixers.made(mixer), np.float32)
    tokens = mixers.tokens(1)
    whole = mixers.run_in_float32(mixer, tokens, mixers.tokens(2))[0]
    x = tokens[:rows].astype(np.float32)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def extend(m, x, state, lengths):
        return m.extend(x, state, lengths=lengths)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def begin(m, x):
        empty = m.init_state(rows, LENGTH, jnp.float32)
        return empty, m.step(x, empty)

    empty, (y, state) = begin(module, x[:, :1])
    np.testing.assert_allclose(y, whole[:rows, :1], rtol=5e-5, atol=1e-5)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state, empty)
    assert all(jax.tree.leaves(same))

    @settings(max_examples=6)
    @given(st.lists(st.lists(st.integers(0, most), min_size=rows, max_size=rows), max_size=12))
    def holds(pieces):
        state, at = empty, np.zeros(rows, int)
        for piece in [*pieces, *[[1, most]] * LENGTH]:
            lengths = np.minimum(piece, LENGTH - at).astype(np.int32)
            if not lengths.any():
                continue
            part = np.full((rows, most, FEATURES), np.nan, np.float32)
            for row, (start, size) in enumerate(zip(at, lengths, strict=True)):
                part[row, :size] = x[row, start : start + size]
            y, state = extend(module, part, state, lengths)
            for row, (start, size) in enumerate(zip(at, lengths, strict=True)):
                expected = whole[row, start : start + size]
                np.testing.assert_allclose(y[row, :size], expected, rtol=5e-5, atol=1e-5)
            at = at + lengths
            np.testing.assert_array_equal(state.length, at)

    holds()


@causal
def test_rows_of_a_state_can_be_repeated_reordered_and_dropped(mixer):
    """As many rows as a token has features, so that no other axis passes for that of the rows."""
    module = mixers.cast(mixers.made(mixer), np.float32)
    assert_rows_can_be_chosen(module, mixers.tokens(1, FEATURES).astype(np.float32))


# Law 5.


@claiming("lengths")
def test_what_is_in_padding_reaches_nothing(mixer):
    """Not a bit of it: NaN there gives what zeros give."""
    given = mixers.padding(mixer)
    given["lengths"] = np.array([LENGTH, 7, 1, 0], np.int32)
    valid = (np.arange(LENGTH) < given["lengths"][:, None])[..., None]
    with jax.enable_x64(True):
        module = mixers.made(mixer, tuned=True)
        x, cotangent = mixers.tokens(1), mixers.tokens(2) * valid

        def filled(value):
            return mixers.to_numpy(mixers.run(module, np.where(valid, x, value), cotangent, given))

        with_nan = filled(np.nan)
        jax.tree.map(np.testing.assert_array_equal, with_nan, filled(0.0))
    y, (of_mixer, of_x) = with_nan
    assert np.isfinite(y).all() and not np.any(np.where(valid, 0, of_x))
    assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(of_mixer))


@claiming("lengths", FIRST, FIRST_OF_FAMILY)
def test_padded_rows_give_what_they_give_alone(mixer):
    given, size = mixers.padding(mixer), 7
    given["lengths"] = np.full(ROWS, size, np.int32)
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    cotangent[:, size:] = 0
    with jax.enable_x64(True):
        ours = mixers.run(mixers.made(mixer, tuned=True), x, cotangent, given)
        alone = mixers.refer(mixer.name, mixers.made(mixer), x[:, :size], cotangent[:, :size])
        y, (of_mixer, of_x) = mixers.to_numpy(ours)
        close((y[:, :size], (of_mixer, of_x[:, :size])), alone, 1e-10)


@claiming("segments")
def test_packed_documents_give_what_they_give_alone(mixer):
    """The first row holds two of them and padding, the next two one each, at its start."""
    given, sizes = mixers.padding(mixer), (5, 6)
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    given["segment_ids"][0] = np.repeat([7, 3, 0], [5, 6, 2])
    starts = (0, 5)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True), 1):
        given["segment_ids"][row] = np.where(np.arange(LENGTH) < size, 1, 0)
        x[row, size:] = np.nan
        cotangent[row, size:] = 0
        x[row, :size] = x[0, start : start + size]
        cotangent[row, :size] = cotangent[0, start : start + size]
    x[0, 11:], cotangent[0, 11:] = np.nan, 0
    with jax.enable_x64(True):
        y, (_, of_x) = mixers.to_numpy(
            mixers.run(mixers.made(mixer, tuned=True), x, cotangent, given)
        )
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True), 1):
        for array in (y, of_x):
            np.testing.assert_allclose(
                array[0, start : start + size], array[row, :size], rtol=1e-11, atol=1e-11
            )


@first
def test_an_example_does_not_depend_on_the_others(mixer):
    """Bit for bit, and even if they are NaN."""
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    y, (_, of_x) = mixers.run_in_float32(mixer, x, cotangent)
    for row in range(ROWS):
        alone = np.where(np.arange(ROWS)[:, None, None] == row, x, np.nan)
        other, (_, of_other) = mixers.run_in_float32(mixer, alone, cotangent)
        np.testing.assert_array_equal(other[row], y[row])
        np.testing.assert_array_equal(of_other[row], of_x[row])


# Law 7.


@first
def test_extreme_values(mixer):
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    extremes = {
        "zeros": np.zeros_like(x),
        "equal": np.ones_like(x),
        "large": x * 1e4,
        "of one sign": np.full_like(x, -1e4),
        "subnormal": x * 1e-42,
    }
    for name, extreme in extremes.items():
        found = mixers.run_in_float32(mixer, extreme * mixer.reference.bounded, cotangent)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found)), name


@one_of_families
def test_one_token(mixer):
    with jax.enable_x64(True):
        x = mixers.tokens(1, length=1)
        module = mixers.made(mixer)
        mix = MIXERS[mixer.name].mix
        both = jax.jit(lambda m, x: (m(x), jax.vmap(lambda row: mix(m, row))(x)))
        close(*both(module, x), 1e-10)


# Law 8.


def program_at(mixer, length, backward=True):
    """Forward, or forward and backward, of one row of that many tokens."""
    options = dict(mixer.reference.cost(length))
    module = jax.eval_shape(lambda: mixers.build(mixer, 16, 1, **options))
    x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    call = (lambda m, x: mixers.both(lambda m, x: m(x), m, x, x)) if backward else lambda m, x: m(x)
    return jax.jit(call).trace(module, x)


LENGTHS = (4096, 32768)


@of_cores
def test_memory_grows_as_claimed(mixer):
    """The temporary bytes of forward and backward together, as compiled."""
    found = [cost.temporary_bytes(program_at(mixer, length)) for length in LENGTHS]
    assert cost.exponent(LENGTHS, found) <= mixer.entry.memory_exponent + 0.1, found


@first
def test_costs_grow_as_claimed(mixer):
    """Operations, forward and backward; no array outgrows the claim on memory."""
    programs = [program_at(mixer, length) for length in LENGTHS]
    counts = [cost.operations(program.jaxpr) for program in programs]
    found = cost.exponent(LENGTHS, counts)
    assert abs(found - mixer.entry.time_exponent) <= 0.1, (found, counts)
    sizes = [cost.equations(program.jaxpr) for program in programs]
    assert max(sizes) <= 1.1 * min(sizes), sizes
    most = mixer.entry.memory_exponent + 0.1
    arrays = [cost.largest(program.jaxpr) for program in programs]
    assert cost.exponent(LENGTHS, arrays) <= most, arrays
    # A forward alone has no array that outgrows it either, and no more of them.
    alone = [program_at(mixer, length, backward=False) for length in LENGTHS]
    arrays = [cost.largest(program.jaxpr) for program in alone]
    assert cost.exponent(LENGTHS, arrays) <= most, arrays
    sizes = [cost.equations(program.jaxpr) for program in alone]
    assert max(sizes) <= 1.1 * min(sizes), sizes


# Law 9.


@first
def test_twice_the_same(mixer):
    x, cotangent = mixers.tokens(1), mixers.tokens(2)
    one, two = (mixers.run_in_float32(mixer, x, cotangent) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.devices
@sharded
def test_sharded_by_rows(mixer):
    """Only the gradients of the parameters are summed, and the numbers are those of one device."""
    if mixer.reference.transforms and jax.__version_info__ < (0, 12):
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
    close(compiled(*args), mixers.run_in_float32(mixer, x, cotangent), 40 * EPS)


@pytest.mark.devices
@called
def test_rows_stay_where_explicit_axes_have_them(mixer):
    """By the types of outputs, of gradients and of states; nothing is computed."""
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
    """Over two sets of parameters, a scan over the examples of calls that keep nothing."""
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

    got = mixers.to_numpy(call(halves, x, cotangent))
    for place, scale in enumerate((1, 2)):
        part = jax.tree.map(lambda p, scale=scale: p / scale, module)
        expected = mixers.run(part, x, cotangent, {})
        close(jax.tree.map(lambda leaf, place=place: leaf[place], got), expected, 40 * EPS)


# What is not claimed.


@first
def test_what_is_not_claimed_is_refused_with_advice(mixer):
    variant = dict(mixer.reference.variants[mixer.variant])

    def made(**options):
        options = {"is_causal": mixer.is_causal, **options}
        return mixer.entry.build(FEATURES, mixers.HEADS, rngs=nnx.Rngs(0), **variant, **options)

    def refused(call, match):
        """Nothing is computed: shapes are enough."""
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
        f"'{mixer.name}' mixes tokens without queries",
    )
    if mixer.has("decode"):

        def extend(x, **options):
            return made(**options).extend(x, made().init_state(ROWS, LENGTH))

        def extend_another():
            wider = mixer.entry.build(2 * FEATURES, mixers.HEADS, rngs=nnx.Rngs(0), **variant)
            return made().extend(x, wider.init_state(ROWS, LENGTH))

        refused(lambda: made().extend(x, ()), "state must be the .* that init_state returned")
        refused(lambda: extend(x[:2]), "cannot be extended by 2 rows")
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
