"""Law 3: a sequence extended in any pieces gives what it gives at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.nn import RotaryEmbedding
from tests.laws import battery
from tests.laws.battery import LAST, MECHANISMS, SQUARE
from tests.laws.rows import assert_rows_can_be_chosen
from tests.laws.sharding import mesh
from tests.marks import slow_but_for
from tests.nn.build import filled

FEATURES, ROWS, LENGTH, MOST = 16, 2, SQUARE.keys, 4


def mixer_of(subject):
    """With random parameters."""
    given = subject.reference.module
    if given is None:
        given = {**subject.options, **subject.reference.decoding}
    options = {
        name: option
        for name, option in given.items()
        if option is not subject.entry.options.get(name)
    }
    mixer = filled(lambda: build(subject, options))
    for name, option in options.items():
        if isinstance(option, np.ndarray):
            mixer.array_options[name] = nnx.Variable(jnp.asarray(option))
    return mixer


def build(subject, options):
    return subject.entry.build(
        FEATURES,
        4,
        num_kv_heads=2 if subject.has("grouped") else 4,
        rngs=nnx.Rngs(0),
        **subject.entry.options_of_model({"rotary": RotaryEmbedding()}),
        **options,
    )


LEFT_OPEN = [s for s in MECHANISMS if s.name == "random"]
ALSO_PLACED = [s for s in MECHANISMS if s.name in ("hierarchical", "delta_net", "long_short")]
DECODING = [s for s in dict.fromkeys([*MECHANISMS, *LAST]) if s.has("decode")]
# Units of several levels are finished one after the other in the last variant alone.
QUICK = [*MECHANISMS, *(s for s in LAST if s.name == "hierarchical")]


@pytest.mark.parametrize("subject", slow_but_for(QUICK, DECODING), ids=str)
def test_any_split_equals_the_whole(subject):
    """Pieces of 0 to 4 tokens, other ones for each row, with NaN after each row's own."""
    mixer = mixer_of(subject)
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, FEATURES)).astype(np.float32)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def begin(m, x):
        return m(x), m.init_state(ROWS, LENGTH, jnp.float32)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def extend(m, x, state, lengths):
        return m.extend(x, state, lengths=lengths)

    whole, empty = begin(mixer, x)
    assert_splits_equal(
        np.asarray(whole),
        x,
        empty,
        lambda x, state, lengths: extend(mixer, x, state, lengths),
    )


@pytest.mark.parametrize("subject", DECODING, ids=str)
def test_an_empty_state_can_be_donated(subject):
    """No two of its arrays are one buffer."""
    leaves = jax.tree.leaves(mixer_of(subject).init_state(ROWS, LENGTH, jnp.float32))
    buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len({*buffers}) == len(buffers)


@pytest.mark.parametrize("subject", slow_but_for(LEFT_OPEN, DECODING), ids=str)
def test_an_exported_program_may_leave_its_rows_open(subject):
    """That of a whole sequence and that of its pieces; nothing is computed."""
    mixer, (rows,) = mixer_of(subject), jax.export.symbolic_shape("b")

    def run(x):
        y, state = mixer.extend(x, mixer.init_state(x.shape[0], LENGTH))
        return y, state, mixer.extend(x[:, :1], state), mixer(jnp.tile(x, (1, 5, 1))[:, :LENGTH])

    x = jax.ShapeDtypeStruct((rows, 3, FEATURES), jnp.float32)
    exported = jax.export.export(jax.jit(run))(x)
    assert all(str(out.shape[0]) == "b" for out in exported.out_avals)


@pytest.mark.devices
@pytest.mark.parametrize("subject", slow_but_for(ALSO_PLACED, DECODING), ids=str)
def test_rows_stay_where_explicit_axes_have_them(subject):
    """By the types of arrays; nothing is computed."""
    devices = mesh(AxisType.Explicit)
    x = np.zeros((4, 3, FEATURES), np.float32)
    x = jax.device_put(x, NamedSharding(devices, PartitionSpec("batch")))

    def run(mixer, x):
        y, state = mixer.extend(x, mixer.init_state(4, LENGTH), lengths=jnp.arange(4) % 4)
        return y, state, mixer.extend(x, state)

    with jax.set_mesh(devices):
        placed = jax.eval_shape(run, mixer_of(subject), x)
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(placed)} == {"batch"}


@pytest.mark.parametrize("subject", [s for s in MECHANISMS if s.reference.per_token], ids=str)
def test_any_split_of_what_each_token_has_equals_the_whole(subject):
    """Of query, key and value together with the other arrays that a decoder takes by token."""
    arrays = battery.draw_plain(subject, 0)
    tokens = {k: arrays[k][:ROWS] for k in subject.of_tokens}
    whole = battery.run(subject, arrays)[0]["out"][:ROWS]
    decoder = battery.decoder_of(subject, arrays)
    sizes = SQUARE.key_heads, SQUARE.size, SQUARE.value_size
    first = {k: tokens[k][:, :1] for k in subject.reference.per_token}
    assert_splits_equal(
        whole,
        tokens,
        decoder.init(ROWS, LENGTH, *sizes, jnp.float32, **first),
        jax.jit(
            lambda tokens, state, lengths: decoder.extend(**tokens, state=state, lengths=lengths),
        ),
    )


def assert_splits_equal(whole, tokens, empty, extend):
    """`tokens` is a pytree of `(ROWS, LENGTH, ...)`, of which `extend` takes up to `MOST`."""

    @settings(max_examples=6)
    @given(st.lists(st.lists(st.integers(0, MOST), min_size=ROWS, max_size=ROWS), max_size=12))
    def holds(pieces):
        # However the draw began, single steps and whole pieces finish it.
        pieces = [*pieces, *[[1, MOST]] * LENGTH]
        state, at = empty, np.zeros(ROWS, int)
        for piece in pieces:
            lengths = np.minimum(piece, LENGTH - at).astype(np.int32)
            if not lengths.any():
                continue
            parts = list(zip(at, lengths, strict=True))

            def pieces_of(x, parts=parts):
                padded = np.full((ROWS, MOST, *x.shape[2:]), np.nan, np.float32)
                for row, (start, size) in enumerate(parts):
                    padded[row, :size] = x[row, start : start + size]
                return padded

            y, state = extend(jax.tree.map(pieces_of, tokens), state, lengths)
            y = np.asarray(y)
            for row, (start, size) in enumerate(parts):
                np.testing.assert_allclose(
                    y[row, :size], whole[row, start : start + size], rtol=2e-5, atol=2e-6
                )
            at = at + lengths
            np.testing.assert_array_equal(state.length, at)

    holds()


@pytest.mark.parametrize("subject", DECODING, ids=str)
def test_a_state_of_a_dtype_that_cannot_hold_it_is_refused(subject):
    """Nothing is computed: shapes are enough."""
    mixer = mixer_of(subject)
    for dtype in (np.int8, bool, np.complex64, jnp.float8_e4m3fn, "floaty"):
        with pytest.raises(ValueError, match="dtype of a decode state must be one of float16"):
            jax.eval_shape(lambda dtype=dtype: mixer.init_state(ROWS, LENGTH, dtype))


@pytest.mark.parametrize("subject", slow_but_for(QUICK, DECODING), ids=str)
def test_rows_of_a_state_can_be_repeated_reordered_and_dropped(subject):
    """As many rows as a token has features, so that no other axis passes for that of the rows."""
    x = np.random.default_rng(0).normal(size=(FEATURES, 6, FEATURES)).astype(np.float32)
    assert_rows_can_be_chosen(mixer_of(subject), x)
