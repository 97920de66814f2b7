"""`implementation="naive"` takes what the default takes: shapes, dtypes and containers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.testing import functions
from effattn.testing.functions import SQUARE, Extent
from tests.dense import draw
from tests.laws.battery import FIRST_NAMES, MECHANISMS
from tests.marks import slow_but_for

# Forms with code of their own for empty sequences and for values without features.
OWN_EDGES = (
    *("performer", "cosformer", "block_linformer", "long_short"),
    *("streaming", "selective", "moba", "native_sparse"),
)
QUICK = [s for s in MECHANISMS if s.name in (*FIRST_NAMES, *OWN_EDGES)]
SIZES = {
    "no batch": SQUARE._replace(batch=()),
    "no examples": SQUARE._replace(batch=(0,)),
    "no tokens": SQUARE._replace(queries=0, keys=0),
    "no value": SQUARE._replace(value_size=0),
}


def of_both_forms(subject, extent, arrays, x64=False):
    """Shapes and dtypes of the results of the default and of the naive form."""
    call = functools.partial(functions.call, subject, extent, known={})
    with jax.enable_x64(x64):
        results = (
            jax.eval_shape(lambda arrays, naive=naive: call(arrays, naive=naive), arrays)
            for naive in (False, True)
        )
        return [jax.tree.map(lambda x: (x.shape, x.dtype), result) for result in results]


@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize("subject", slow_but_for(QUICK, MECHANISMS), ids=str)
def test_empty_and_missing_axes(subject, label):
    arrays = functions.draw_arrays(subject, SIZES[label], everything=False)
    arrays = functions.cast(subject, arrays, jnp.float32)
    for is_causal in (True, False):
        if subject.has("causal" if is_causal else "bidirectional"):
            extent = Extent(is_causal, tuning=False)
            fast, naive = of_both_forms(subject, extent, arrays)
            assert fast == naive


@pytest.mark.parametrize("subject", slow_but_for(QUICK, MECHANISMS), ids=str)
def test_results_of_mixed_dtypes_have_the_promised_ones(subject):
    arrays = functions.draw_arrays(subject, SQUARE, everything=False)
    arrays = functions.cast(subject, arrays, jnp.float32)
    arrays["value"] = arrays["value"].astype(np.float64)
    extent = Extent(subject.has("causal"), tuning=False)
    fast, naive = of_both_forms(subject, extent, arrays, x64=True)
    assert fast == naive


IDS = np.array([[1, 1, 2, 2, 2], [3, 3, 3, 4, 0]])
WIDE = np.array([[1, 1, 1 + 2**32, 1 + 2**32, 9], [2**40, 2**40, 7, 7, 0]])
CONTAINERS = {
    "list of rows": {"segment_ids": [*IDS]},
    "nested list": {"segment_ids": IDS.tolist()},
    "pair of lists": {"segment_ids": (IDS.tolist(), IDS.tolist())},
    "list of a pair": {"segment_ids": [jnp.asarray(IDS), jnp.asarray(IDS)]},
    "lengths": {"query_seq_lengths": [3, 5], "key_value_seq_lengths": [5, 2]},
    "offset and window": {"query_offset": [2, 0], "local_window_size": [1, 2]},
    "mask": {"mask": (IDS[:, None, None] != 3).tolist()},
}


@pytest.mark.parametrize("label", CONTAINERS)
def test_lists_mean_what_they_mean_in_the_fast_form(label):
    arrays = draw(5, 5, dtype=np.float32)
    arrays = {name: x.tolist() if label == "mask" else x for name, x in arrays.items()}
    fast, naive = (
        effattn.dot_product_attention(**arrays, **CONTAINERS[label], implementation=i)
        for i in (None, "naive")
    )
    np.testing.assert_allclose(naive, fast, atol=1e-6)


def test_ids_of_64_bits_keep_all_bits():
    arrays = draw(5, 5)
    with jax.enable_x64(True):
        for attend in (effattn.dot_product_attention, effattn.retention):
            for ids in (WIDE, WIDE.tolist()):
                fast, naive = (
                    attend(**arrays, segment_ids=ids, implementation=i) for i in (None, "naive")
                )
                np.testing.assert_allclose(naive, fast, atol=1e-12)


def test_lists_of_recurrences_and_of_functions_without_heads():
    arrays = {name: x.tolist() for name, x in draw(5, 5, dtype=np.float32).items()}
    given = {"segment_ids": IDS.tolist(), "query_seq_lengths": [3, 5]}
    fast, naive = (effattn.retention(**arrays, **given, implementation=i) for i in (None, "naive"))
    np.testing.assert_allclose(naive, fast, atol=1e-6)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    fast, naive = (
        effattn.hyena_convolution(np.stack([x, x]), x, x, lengths=[3, 4], implementation=i)
        for i in (None, "naive")
    )
    np.testing.assert_allclose(naive, fast, atol=1e-5)


@pytest.mark.parametrize(
    "precision", ["highest", ("default", "highest"), jax.lax.DotAlgorithmPreset.F32_F32_F32]
)
def test_every_precision_is_taken(precision):
    arrays = draw(5, 5, dtype=np.float32)
    fast, naive = (
        effattn.dot_product_attention(**arrays, precision=precision, implementation=i)
        for i in ("xla", "naive")
    )
    np.testing.assert_allclose(naive, fast, atol=1e-6)
