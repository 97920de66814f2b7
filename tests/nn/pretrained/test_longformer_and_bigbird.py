"""Pretrained layers agree with Hugging Face's transformers (`tests/golden`)."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.nn import bigbird_from_transformers, longformer_from_transformers
from tests.marks import slow

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@functools.cache
def golden(name):
    """Arrays by case; the case "parameter" holds the parameters."""
    cases = {}
    with np.load(GOLDEN / f"transformers_{name}.npz") as arrays:
        for key in arrays.files:
            case, _, item = key.partition("/")
            cases.setdefault(case, {})[item] = arrays[key]
    return cases


def load_longformer(parameters=None, **options):
    options = {"num_heads": 4, "attention_window": 8, "max_global": 3, **options}
    parameters = golden("longformer")["parameter"] if parameters is None else parameters
    return longformer_from_transformers(parameters, **options)


def load_bigbird(case=None, parameters=None, **options):
    """BigBird from the golden file; a case without random blocks has exact attention."""
    options = {"num_heads": 4, "block_size": 4, **options}
    if case is None or "random_blocks" not in case:
        options = {"attention_type": "original_full", **options}
    else:
        # The first and the last block are global, and transformers draws no random blocks for them.
        drawn = np.pad(case["random_blocks"], ((0, 0), (1, 1), (0, 0)), constant_values=-1)
        options["random_blocks"] = drawn
    parameters = golden("bigbird")["parameter"] if parameters is None else parameters
    return bigbird_from_transformers(parameters, **options)


@jax.jit
def with_gradient(mixer, x, cotangent, given):
    y, pull_back = jax.vjp(lambda x: mixer(x, **given), x)
    return y, pull_back(cotangent)[0]


def check(mixer, case, **given):
    """Checks the valid rows and the gradient, with NaN in the padding."""
    valid = np.arange(case["x"].shape[1]) < case["lengths"][:, None]
    x = np.where(valid[..., None], case["x"], np.nan)
    cotangent = np.where(valid[..., None], case["cotangent"], 0)
    y, gradient = with_gradient(mixer, x, cotangent, {"lengths": case["lengths"], **given})
    y = np.asarray(y)
    np.testing.assert_allclose(y[valid], case["output"][valid], rtol=0, atol=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [slow("no_global"), slow("global"), slow("padded"), "ragged"])
def test_longformer_agrees_with_transformers(case):
    case = golden("longformer")[case]
    check(load_longformer(), case, global_mask=case["global_mask"])


@pytest.mark.parametrize(
    "case",
    [
        "full",
        *(slow(n) for n in ("one_random", "two_random", "padded")),
    ],
)
def test_bigbird_agrees_with_transformers(case):
    case = golden("bigbird")[case]
    check(load_bigbird(case), case)


@pytest.mark.slow
def test_bigbird_draws_random_blocks_from_its_seed():
    x = golden("bigbird")["two_random"]["x"]
    call = jax.jit(lambda mixer, x: mixer(x))
    first, other = (
        call(load_bigbird(attention_type="block_sparse", num_random_blocks=2, seed=seed), x)
        for seed in (0, 1)
    )
    assert not np.allclose(first, other)


def renamed(parameters, prefix):
    return {prefix + name: array for name, array in parameters.items()}


def test_one_layer_of_a_whole_model():
    parameters = golden("longformer")["parameter"]
    first, second = "encoder.layer.0.attention.", "encoder.layer.1.attention."
    model = {
        "embeddings.word_embeddings.weight": np.zeros((3, 24)),
        **renamed(parameters, first),
        **renamed({name: -array for name, array in parameters.items()}, second),
    }
    chex.assert_trees_all_equal(load_longformer(model, prefix=first), load_longformer())
    with pytest.raises(ValueError, match=f"under the prefixes '{first}', '{second}'$"):
        load_longformer(model)


def test_self_attention_alone_gives_the_heads_side_by_side():
    """With their output projection, the heads give the output of the whole layer."""
    parameters = golden("longformer")["parameter"]
    case = golden("longformer")["padded"]
    heads = load_longformer(parameters, prefix="self.")
    given = {"lengths": case["lengths"], "global_mask": case["global_mask"]}
    y, _ = with_gradient(heads, case["x"], case["cotangent"], given)
    y = y @ parameters["output.dense.weight"].T + parameters["output.dense.bias"]
    valid = np.arange(case["x"].shape[1]) < case["lengths"][:, None]
    np.testing.assert_allclose(y[valid], case["output"][valid], rtol=0, atol=1e-5)


def test_arrays_of_other_libraries_and_dtypes():
    parameters = golden("longformer")["parameter"]
    chex.assert_trees_all_equal(
        load_longformer({name: jnp.asarray(array) for name, array in parameters.items()}),
        load_longformer(),
    )
    half = load_longformer(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(half))
    torch = pytest.importorskip("torch")
    tensors = {n: torch.nn.Parameter(torch.from_numpy(a)) for n, a in parameters.items()}
    chex.assert_trees_all_equal(load_longformer(tensors), load_longformer())
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    chex.assert_trees_all_equal(load_longformer(halves, param_dtype=jnp.bfloat16), half)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self.key_global.bias": None}, "missing: self.key_global.bias"),
        ({"output.dense.weight": None}, "missing: output.dense.weight"),
        ({"self.query.scale": np.zeros(24)}, "unexpected: self.query.scale"),
        (
            {"self.value.weight": np.zeros((24, 8))},
            r"self.value.weight must have shape \(24, 24\), got \(24, 8\)",
        ),
        (
            {"self.query.weight": np.zeros((24, 25))},
            r"self.query.weight must have size 24 along .* got the shape \(24, 25\); take",
        ),
        ({"self.key.bias": np.zeros(24, object)}, "self.key.bias must be an array .* got object"),
        ({"output.dense.bias": np.zeros(3)}, r"output.dense.bias must have shape \(24,\), got"),
    ],
)
def test_entries_that_do_not_fit_are_named(change, message):
    parameters = {**golden("longformer")["parameter"], **change}
    parameters = {name: array for name, array in parameters.items() if array is not None}
    with pytest.raises(ValueError, match=message):
        load_longformer(parameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide the layer's 24 features, got 5"),
        ({"num_heads": "a"}, "num_heads must divide the layer's 24 features, got 'a'"),
        ({"attention_window": None}, "attention_window must be even and .* got None"),
        ({"attention_window": 7}, "attention_window must be even and at least 2.*got 7"),
        ({"prefix": "encoder."}, "missing: output.dense.bias"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_longformer(**options)


def test_bigbird_arguments_and_entries_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="one of original_full, block_sparse, got 'sparse'"):
        load_bigbird(attention_type="sparse")
    for wrong in ({"block_size": 0}, {"num_random_blocks": "a"}, {"seed": 2.5}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be an int"):
            load_bigbird(attention_type="block_sparse", **wrong)
    with pytest.raises(ValueError, match="random_blocks needs attention_type='block_sparse'"):
        load_bigbird(random_blocks=np.zeros((4, 4, 1), int))
    with pytest.raises(ValueError, match="unexpected: self.key_global.bias"):
        load_bigbird(parameters=golden("longformer")["parameter"])
    with pytest.raises(ValueError, match="missing: self.key_global.bias"):
        load_longformer(golden("bigbird")["parameter"])
