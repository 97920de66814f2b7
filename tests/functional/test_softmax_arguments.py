"""Refused arguments of the functions of softmax attention, and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import dot_product_attention, sliding_window_attention

# Bad input

QUERY = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32)
KEY = jax.ShapeDtypeStruct((2, 7, 2, 8), jnp.float32)
VALUE = jax.ShapeDtypeStruct((2, 7, 2, 3), jnp.float32)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return array(*shape, dtype=jnp.int32)


BAD_ARRAYS = [
    ({"query": array(6, 4)}, r"query must have shape \(\*batch, length, .*got \(6, 4\)"),
    ({"key": integers(2, 7, 2, 8)}, "key must be floating point, got dtype int32"),
    ({"key": array(3, 7, 2, 8)}, r"same batch dimensions, got \(2,\), \(3,\) and \(2,\)"),
    ({"value": array(7, 2, 3)}, r"same batch dimensions, got \(2,\), \(2,\) and \(\)"),
    ({"key": array(2, 7, 2, 8, dtype=jnp.bfloat16)}, "same dtype, got float32 and bfloat16"),
    ({"key": array(2, 7, 2, 9)}, "same head size, got 8 in query .* 9 in key"),
    ({"value": array(2, 6, 2, 3)}, r"of key, \(7, 2\), got \(6, 2\) in value \(2, 6, 2, 3\)"),
    ({"value": array(2, 7, 4, 3)}, r"of key, \(7, 2\), got \(7, 4\)"),
    (
        {"key": array(2, 7, 3, 8), "value": array(2, 7, 3, 3)},
        "multiple of the number of key heads, got 4 query heads and 3 key heads",
    ),
    ({"bias": array(3, 6, 7)}, r"bias must broadcast to .* \(2, 4, 6, 7\), got \(3, 6, 7\)"),
    ({"bias": array(3, 2, 4, 6, 7)}, r"bias must broadcast to .*got \(3, 2, 4, 6, 7\)"),
    (
        {"bias": array(6, 7, dtype=jnp.bool_)},
        "bias must be floating point or integers, got dtype bool",
    ),
    ({"mask": array(6, 7)}, "mask must be bool, .*got dtype float32; .* is a bias"),
    ({"mask": array(5, 7, dtype=jnp.bool_)}, r"mask must broadcast .*got \(5, 7\)"),
    ({"query_seq_lengths": integers(3)}, r"query_seq_lengths must be integers of shape \(2,\)"),
    ({"key_value_seq_lengths": array(2)}, r"key_value_seq_lengths must be .*float32 of shape"),
    ({"segment_ids": integers(2, 6)}, "segment_ids must be a pair .*length 6 and key length 7"),
    ({"segment_ids": (integers(2, 6),) * 3}, "one array or a pair .*got 3 items"),
    (
        {"segment_ids": (integers(2, 6), integers(2, 6))},
        r"segment_ids of the key must be integers of shape \(2, 7\), got int32 of shape \(2, 6\)",
    ),
    ({"segment_ids": (array(2, 6), integers(2, 7))}, "segment_ids of the query .*got float32"),
    ({"query_offset": integers(3)}, r"query_offset must be .*\(\) or \(2,\), got int32 of shape"),
    ({"query_offset": array()}, "query_offset must be an int, .*got float32"),
    ({"sink": array(2)}, r"sink must be floating point of shape \(4,\), .*shape \(2,\)"),
    ({"sink": integers(4)}, "sink must be floating point .*got int32"),
    ({"scale": array(4)}, r"scale must be a number or an array of shape \(\)"),
]

BAD_NUMBERS = [
    ({"scale": True}, "scale must be a number"),
    ({"local_window_size": -1}, "local_window_size must be .*0 or more.*got -1"),
    ({"local_window_size": (1, 2, 3)}, r"a pair \(left, right\) .*got \(1, 2, 3\)"),
    ({"local_window_size": 2.5}, "local_window_size must be an int .*got 2.5"),
    ({"local_window_size": True}, "local_window_size must be an int .*got True"),
    ({"local_window_size": np.array([3, 2])}, r"local_window_size must be .*got array\(\[3, 2\]\)"),
    ({"local_window_size": np.array(3.7)}, r"local_window_size must be .*got array\(3.7\)"),
    ({"query_offset": np.array(2.5)}, "query_offset must be an int, or .*got float32"),
    ({"query_offset": 2**31}, "query_offset must lie between .*got 2147483648"),
    ({"scale": 1j}, "scale must be a number or an array .*got 1j"),
    ({"scale": "1"}, "scale must be a number or an array .*got '1'"),
    ({"score_mod": 3}, r"score_mod must be a function \(logit, b, h, i, j\), got 3"),
    (
        {"segment_ids": (np.ones((2, 6), int), None)},
        "segment_ids must be .* 2 items, of which one is None",
    ),
    ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a finite number above 0, got 0.0"),
    ({"logits_soft_cap": -2.0}, "logits_soft_cap must be a finite number above 0, got -2.0"),
    ({"logits_soft_cap": float("inf")}, "logits_soft_cap must be a finite number above 0, got inf"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), got 1.0"),
    ({"dropout_rate": -0.1}, r"dropout_rate must be a number in \[0, 1\), got -0.1"),
    ({"dropout_rate": 0.1}, "dropout_rate=0.1 needs dropout_rng"),
    ({"dropout_rate": 0.1, "dropout_rng": 3}, "dropout_rate=0.1 needs dropout_rng.*got 3"),
    ({"tile": 64}, r"tile must be a pair \(queries, keys\) of positive ints, got 64"),
    ({"tile": (64, 0)}, r"tile must be a pair .*got \(64, 0\)"),
    ({"implementation": "cuda"}, "unknown implementation 'cuda'; known are .*'xla'.*'cudnn'"),
    ({"implementation": ("xla", "cuda")}, "unknown implementation 'cuda'"),
    ({"implementation": ()}, r"implementation must be None, a name or a tuple .*got \(\)"),
    ({"implementation": 1}, "implementation must be None, a name or a tuple of names, got 1"),
]


def trace(function, arrays=None, **options):
    """Shapes of the result for the arrays above, some of which may be replaced."""
    arrays = {"query": QUERY, "key": KEY, "value": VALUE} | (arrays or {})
    return jax.eval_shape(lambda arrays: function(**arrays, **options), arrays)


def functions_taking(*names):
    yield dot_product_attention
    if not {"bias", "mask"} & set(names):
        yield functools.partial(sliding_window_attention, local_window_size=3)


@pytest.mark.parametrize("arrays, message", BAD_ARRAYS, ids=str)
def test_a_wrong_array_is_named_with_what_it_needs(arrays, message):
    for function in functions_taking(*arrays):
        with pytest.raises(ValueError, match=message):
            trace(function, arrays)


@pytest.mark.parametrize("options, message", BAD_NUMBERS, ids=str)
def test_a_wrong_number_is_named_with_what_it_needs(options, message):
    for function in functions_taking():
        with pytest.raises(ValueError, match=message):
            trace(function, **options)


@pytest.mark.parametrize("option", ["dropout_rate", "logits_soft_cap"])
def test_a_traced_number_that_must_be_known_is_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be a .*number"):
        trace(dot_product_attention, {option: array()})


def test_an_argument_it_lacks_is_a_type_error():
    with pytest.raises(TypeError, match="dilation"):
        trace(dot_product_attention, dilation=2)
    with pytest.raises(TypeError, match="bias"):
        trace(sliding_window_attention, local_window_size=2, bias=None)


# Implementations


@pytest.mark.parametrize("name", ["pallas", "mosaic_gpu", "mosaic_tpu", "triton", ("triton",)])
def test_a_named_implementation_never_falls_back(name):
    """A name without an implementation is refused at the call; others when they are lowered."""
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    arrays = {k: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for k, x in arrays.items()}
    for function in functions_taking():
        call = functools.partial(function, implementation=name)
        message = "no '.*' implementation.*'xla' takes|runs by .* alone; .*'xla' runs anywhere"
        with pytest.raises(NotImplementedError, match=message):
            jax.jit(lambda arrays, call=call: call(**arrays)).lower(arrays)


def test_cudnn_that_is_not_there_stands_in_the_way_of_no_other():
    """Under jit, a Pallas kernel that the trace has chosen could no longer fall back to XLA."""
    run = functools.partial(dot_product_attention, implementation=("pallas", "cudnn", "xla"))
    query, key, value = (jnp.ones(array.shape) for array in (QUERY, KEY, VALUE))
    np.testing.assert_array_equal(jax.jit(run)(query, key, value), run(query, key, value))


def test_implementations_are_tried_in_order():
    for function in functions_taking():
        assert trace(function, implementation=("pallas", "xla")).shape == (2, 6, 4, 3)


IN_16_BITS = {
    name: array(*given.shape, dtype=jnp.bfloat16)
    for name, given in (("query", QUERY), ("key", KEY), ("value", VALUE))
}


@pytest.fixture
def calls_of_jax_nn(monkeypatch):
    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        out = jnp.zeros((2, 6, 4, 3))
        return (out, out[..., 0]) if kwargs["return_residual"] else out

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return calls


@pytest.mark.parametrize("return_residual", [False, True])
def test_cudnn_passes_the_call_on_to_jax_nn(calls_of_jax_nn, return_residual):
    arrays = {
        **IN_16_BITS,
        "bias": array(6, 7),
        "mask": array(1, 1, 6, 7, dtype=jnp.bool_),
        "query_seq_lengths": integers(2),
        "key_value_seq_lengths": integers(2),
    }
    options = {
        "scale": 0.5,
        "is_causal": True,
        "local_window_size": 3,
        "return_residual": return_residual,
        "implementation": "cudnn",
    }
    results = trace(dot_product_attention, arrays, **options)
    assert jax.tree.map(jnp.shape, results) == (
        ((2, 6, 4, 3), (2, 6, 4)) if return_residual else (2, 6, 4, 3)
    )
    ((positional, keywords),) = calls_of_jax_nn
    names = ("query", "key", "value", "bias", "mask")
    given = dict(zip(names, positional, strict=True)) | keywords
    assert given.keys() == arrays.keys() | options.keys()
    assert given["local_window_size"] == (3, 3)
    for name in options.keys() - {"local_window_size"}:
        assert given[name] == options[name]
    for name in arrays.keys() - {"bias"}:
        assert given[name].shape == arrays[name].shape
    assert given["bias"].shape == (1, 1, 6, 7)


UNKNOWN_TO_JAX_NN = {
    "query_offset": 1,
    "segment_ids": (np.ones((2, 6), int), np.ones((2, 7), int)),
    "logits_soft_cap": 2.0,
    "score_mod": lambda logit, b, h, i, j: logit,
    "sink": np.zeros(4, np.float32),
    "dropout_rate": 0.1,
    "precision": "highest",
    "tile": (4, 4),
}


@pytest.mark.parametrize("option", UNKNOWN_TO_JAX_NN)
def test_cudnn_refuses_what_jax_nn_lacks(option, calls_of_jax_nn):
    options = {option: UNKNOWN_TO_JAX_NN[option]}
    if option == "dropout_rate":
        options["dropout_rng"] = jax.random.key(0)
    with pytest.raises(NotImplementedError, match=f"cudnn.* does not take {option}; .*'xla' takes"):
        trace(dot_product_attention, implementation="cudnn", **options)
    assert trace(dot_product_attention, implementation=("cudnn", "xla"), **options) is not None
    assert calls_of_jax_nn == []


def test_cudnn_gives_way_to_a_gpu_kernel_named_before_it_but_not_to_a_cpu_kernel(calls_of_jax_nn):
    def program(*names):
        call = functools.partial(dot_product_attention, scale=0.25, implementation=names)
        return str(jax.make_jaxpr(lambda arrays: call(**arrays))(IN_16_BITS))

    assert "block_attention" in program("triton", "cudnn")
    assert "block_attention" in program("xla", "cudnn")
    assert "block_attention" not in program("cudnn", "xla")
    assert "block_attention" not in program("llvm", "cudnn", "xla")


def test_cudnn_that_is_not_there_is_refused_or_passed_over():
    with pytest.raises(NotImplementedError, match="cudnn.*refuses the call"):
        trace(dot_product_attention, IN_16_BITS, implementation="cudnn")
    with pytest.raises(
        NotImplementedError, match="'cudnn'.* takes bfloat16 and float16, got float32"
    ):
        trace(dot_product_attention, implementation="cudnn")
    out = trace(dot_product_attention, implementation=("cudnn", "xla"))
    assert out.shape == (2, 6, 4, 3)


def test_a_window_has_no_cudnn():
    with pytest.raises(NotImplementedError, match="sliding_window_attention has no 'cudnn'"):
        trace(sliding_window_attention, implementation="cudnn", local_window_size=2)
