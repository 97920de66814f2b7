"""Decode states: donated, exported with an open number of rows, sharded, and of a valid dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn.testing.functions import SQUARE
from tests.laws.battery import LAST, MECHANISMS, mixer_of
from tests.laws.sharding import mesh
from tests.marks import slow_but_for

FEATURES, ROWS, LENGTH = 16, 2, SQUARE.keys

LEFT_OPEN = [s for s in MECHANISMS if s.name == "random"]
ALSO_PLACED = [s for s in MECHANISMS if s.name in ("hierarchical", "delta_net", "long_short")]
DECODING = [
    s for s in {(s.name, s.variant): s for s in [*LAST, *MECHANISMS]}.values() if s.has("decode")
]


@pytest.mark.parametrize("subject", DECODING, ids=str)
def test_an_empty_state_can_be_donated(subject):
    """No two arrays of the state share a buffer."""
    leaves = jax.tree.leaves(mixer_of(subject).init_state(ROWS, LENGTH, jnp.float32))
    buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len({*buffers}) == len(buffers)


@pytest.mark.parametrize("subject", slow_but_for(LEFT_OPEN, DECODING), ids=str)
def test_an_exported_program_may_leave_its_rows_open(subject):
    """The test exports a whole sequence and pieces of a sequence; nothing is computed."""
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
    """Only the types of arrays are checked; nothing is computed."""
    devices = mesh(AxisType.Explicit)
    x = np.zeros((4, 3, FEATURES), np.float32)
    x = jax.device_put(x, NamedSharding(devices, PartitionSpec("batch")))

    def run(mixer, x):
        y, state = mixer.extend(x, mixer.init_state(4, LENGTH), lengths=jnp.arange(4) % 4)
        return y, state, mixer.extend(x, state)

    with jax.set_mesh(devices):
        placed = jax.eval_shape(run, mixer_of(subject), x)
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(placed)} == {"batch"}


@pytest.mark.parametrize("subject", DECODING, ids=str)
def test_a_state_of_a_dtype_that_cannot_hold_it_is_refused(subject):
    """Nothing is computed, because shapes are enough."""
    mixer = mixer_of(subject)
    for dtype in (np.int8, bool, np.complex64, jnp.float8_e4m3fn, "floaty"):
        with pytest.raises(ValueError, match="dtype of a decode state must be one of float16"):
            jax.eval_shape(lambda dtype=dtype: mixer.init_state(ROWS, LENGTH, dtype))
