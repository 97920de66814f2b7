"""Mega: its authors' layer, its moving average, its limits, its state and wrong arguments."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import Mega
from tests.nn.build import filled, floats

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "mega.npz"
SIZES = {"chunk_length": 4, "ema_dim": 3, "shared_dim": 4, "value_dim": 6}
CASES = {
    "both_ways": {"is_causal": False, "relative_bias": "simple"},
    "causal": {},
    "causal_laplace": {"attention_function": "laplace", "relative_bias": "simple"},
    "padded": {"is_causal": False, "attention_function": "laplace", "chunk_length": 12},
}


def make(**options):
    return Mega(8, rngs=nnx.Rngs(0), **{**SIZES, **options})


def from_transformers(arrays, **options):
    """The mixer with the parameters of the layer of transformers."""
    mixer = make(**options)
    sides = mixer.alpha.shape[0]

    def put(parameter, array):
        parameter[...] = jnp.asarray(array).reshape(parameter.shape)

    # The factor of the inputs is alpha in the paper, and the damping factor in the code.
    names = {
        "alpha": "damping_factor",
        "delta": "decay_factor",
        "beta": "ema_expansion_matrix",
        "eta": "kernel_projection_matrix",
    }
    for name, other in names.items():
        put(getattr(mixer, name), arrays[f"ema_gate.{other}"].reshape(sides, 8, 3))
    put(mixer.omega, arrays["ema_gate.residual_weight"])
    put(mixer.value.kernel, arrays["v_proj.weight"].T)
    put(mixer.value.bias, arrays["v_proj.bias"])
    # The layer of transformers has the four projections of the average in one.
    borders = np.cumsum([8, 4, 6])
    kernels = np.split(arrays["mx_proj.weight"].T, borders, -1)
    biases = np.split(arrays["mx_proj.bias"], borders)
    layers = mixer.update, mixer.shared, mixer.reset, mixer.candidate
    for layer, kernel, bias in zip(layers, kernels, biases, strict=True):
        put(layer.kernel, kernel)
        put(layer.bias, bias)
    # The layer of transformers has two biases there.
    put(mixer.candidate.bias, biases[-1] + arrays["h_proj.bias"])
    put(mixer.out.kernel, arrays["h_proj.weight"].T)
    put(mixer.kappa, arrays["qk_weight"])
    put(mixer.mu, arrays["qk_bias"])
    if mixer.relative_bias == "simple":
        put(mixer.position_bias, arrays["rel_pos_bias.rel_pos_bias"][: mixer.position_bias.size])
    else:
        both = arrays["rel_pos_bias.alpha"], arrays["rel_pos_bias.b_param"]
        put(mixer.position_bias, np.concatenate(both))
    return mixer


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_transformers(case):
    with np.load(GOLDEN) as file:
        names = [name for name in file.files if name.startswith(f"{case}/")]
        arrays = {name.removeprefix(f"{case}/"): file[name] for name in names}
    mixer = from_transformers(arrays, **CASES[case])
    lengths = arrays.get("lengths")

    @jax.jit
    def outputs_and_gradients(mixer, x):
        def call(x):
            y = mixer(x, lengths=lengths)
            present = lengths is None or (np.arange(12) < lengths[:, None])[..., None]
            return jnp.where(present, y, 0)

        y, pull_back = jax.vjp(call, x)
        return y, *pull_back(jnp.asarray(arrays["cotangent"]))

    y, d_x = outputs_and_gradients(mixer, arrays["x"])
    np.testing.assert_allclose(y, arrays["output"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_x, arrays["d_x"], rtol=1e-4, atol=1e-4)


def test_a_chunk_that_holds_the_sequence_is_attention_to_all_tokens():
    x = floats(1, 7, 8)
    one, other = (filled(lambda size=size: make(chunk_length=size)) for size in (7, 50))
    np.testing.assert_allclose(*(jax.jit(lambda m: m(x))(m) for m in (one, other)), atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_chunks_exchange_the_moving_average_alone(is_causal):
    mixer, x = filled(lambda: make(is_causal=is_causal)), jnp.asarray(floats(1, 8, 8))
    run = jax.jit(lambda m, x: m(x)[0, 4:])
    other = x.at[:, :4].add(1)
    assert not np.allclose(run(mixer, x), run(mixer, other), atol=1e-3)
    mixer.eta[...] = jnp.zeros_like(mixer.eta[...])
    np.testing.assert_allclose(run(mixer, x), run(mixer, other), atol=1e-6)


def test_documents_have_chunks_and_averages_of_their_own():
    """Also with padding between the documents, over which no average reads."""
    mixer, x = filled(lambda: make(is_causal=False)), floats(1, 17, 8)
    run = jax.jit(lambda m, x, ids: m(x, segment_ids=ids))
    ids = np.repeat([1, 2, 0, 3], [3, 9, 2, 3])[None]
    packed = run(mixer, x, ids)
    for document in (slice(0, 3), slice(3, 12), slice(14, 17)):
        alone = jax.jit(lambda m, x: m(x))(mixer, x[:, document])
        np.testing.assert_allclose(packed[:, document], alone, atol=1e-5)


@pytest.mark.parametrize("size", [40.0, -40.0])
def test_decays_of_zero_and_one_have_finite_outputs_and_gradients(size):
    mixer, x = filled(make), floats(1, 9, 8)
    mixer.alpha[...] = jnp.full_like(mixer.alpha[...], size)
    mixer.delta[...] = jnp.full_like(mixer.delta[...], size)
    y, gradient = jax.jit(jax.value_and_grad(lambda m: jnp.sum(m(x) ** 2)))(mixer)
    assert np.isfinite(y)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_the_state_has_a_constant_size():
    state = jax.eval_shape(lambda: make().init_state(3, 10**6))
    assert state.average.shape == (3, 8, 3)
    assert state.tokens.key.shape == (3, 3, 1, 4) and state.tokens.value.shape == (3, 3, 1, 6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_operations_and_arrays_grow_linearly(is_causal):
    mixer = nnx.eval_shape(lambda: make(chunk_length=32, is_causal=is_causal))
    lengths = 512, 8192

    def counted(packed):
        for length in lengths:
            x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
            given = {"segment_ids": jax.ShapeDtypeStruct((1, length), jnp.int32)} if packed else {}
            program = jax.make_jaxpr(lambda m, x, given: m(x, **given))(mixer, x, given)
            yield (None if packed else cost.operations(program)), cost.largest(program)

    (operations, arrays), (_, of_packed) = (zip(*counted(packed), strict=True) for packed in (0, 1))
    assert cost.exponent(lengths, operations) <= 1.1
    assert max(cost.exponent(lengths, sizes) for sizes in (arrays, of_packed)) <= 1.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_length": 0}, "chunk_length must be an int, 1 or more tokens, got 0"),
        ({"ema_dim": 0}, "ema_dim must be an int, 1 or more dimensions, got 0"),
        ({"value_dim": 0}, "value_dim must be an int, 1 or more features, got 0"),
        ({"shared_dim": 3}, "shared_dim must be even with relative_bias='rotary'.*got 3"),
        (
            {"attention_function": "relu"},
            "attention_function must be one of softmax, laplace, got 'relu'",
        ),
        ({"relative_bias": None}, "relative_bias must be one of simple, rotary, got None"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: make(**options))
