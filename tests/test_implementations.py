"""What `effattn.support` says, against what calls do."""

import functools

import jax
import jax.numpy as jnp
import pytest

import effattn
from effattn import dispatch, registry
from tests.laws import battery
from tests.laws.battery import CALLED, SQUARE

KERNELS = [name for name, platform in dispatch.PLATFORMS.items() if platform is not None]


def refusal(mechanism, implementation, dtype):
    """Why a call in that dtype is refused; None if it is not."""
    extent = battery.plain(mechanism)._replace(tuning=False)
    arrays = battery.draw_arrays(mechanism, SQUARE, everything=False)
    arrays = battery.cast(mechanism, arrays, dtype)
    options = battery.fixed_options(mechanism, extent, arrays)
    if "block_size" in options:
        options["block_size"] = 128  # a tile of every kernel
    call = functools.partial(mechanism.entry.function, **options, implementation=implementation)
    try:
        with dispatch.interpreted():
            jax.eval_shape(call, **arrays)
    except NotImplementedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
@pytest.mark.parametrize("mechanism", CALLED, ids=str)
def test_a_mechanism_has_the_implementations_that_are_listed(mechanism, implementation):
    listed = {row.implementation: row for row in effattn.support(str(mechanism))}
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
            found = refusal(mechanism, implementation, dtype)
            row = listed.get(implementation)
            is_listed = row is not None and str(jnp.dtype(dtype)) in row.dtypes
            if is_listed and "needs jax 0.12" in (found or ""):
                assert jax.__version_info__ < (0, 12) and "jax 0.12 for" in row.others
                continue
            assert (found is None) == is_listed, (dtype, row, found)


def test_it_prints_a_table_and_names_what_it_does_not_know():
    table = str(effattn.support("softmax"))
    assert "| `softmax` | `triton` | cuda | float32, bfloat16, float16 | up to 256 |" in table
    everything = effattn.support()
    with_cores = [name for name in registry.names() if registry.get(name).cores]
    assert {row.mechanism for row in everything} == {*with_cores, "paged_attention"}
    with pytest.raises(ValueError, match="unknown mechanism 'sofmax'"):
        effattn.support("sofmax")
