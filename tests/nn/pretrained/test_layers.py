"""Pretrained layers agree with Hugging Face's transformers (`tests/golden`), and decode alike."""

import functools
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import nn
from tests.marks import slow

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@functools.cache
def golden(file, case=""):
    """Parameters of a case, and its other arrays."""
    start = f"{case}/" if case else ""
    with np.load(GOLDEN / f"{file}.npz") as arrays:
        found = {n.removeprefix(start): arrays[n] for n in arrays.files if n.startswith(start)}
    of_layer = "parameter/"
    parameters = {n.removeprefix(of_layer): x for n, x in found.items() if n.startswith(of_layer)}
    return parameters, {n: x for n, x in found.items() if n not in parameters}


def loader(name, **options):
    """A loader with the options of its case."""
    return functools.partial(getattr(nn, f"{name}_from_transformers"), **options)


LATENT = loader("latent", num_heads=2, head_dim=6)
LOCAL = loader("reformer_local", num_heads=2, chunk_length=3)
# For each case, the loader, and the golden file with its case.
DECODING = {
    "mamba": (loader("mamba"), "transformers_mamba", ""),
    "mamba2 of one group": (loader("mamba2", num_groups=1), "transformers_mamba2", "one_group"),
    "mamba2": (loader("mamba2", num_groups=2), "transformers_mamba2", "two_groups"),
    "rwkv4": (loader("rwkv4"), "transformers_rwkv", "time"),
    "rwkv4 channels": (loader("rwkv4_channel_mix"), "transformers_rwkv", "channel"),
    "gated delta": (loader("gated_delta_net", num_key_heads=2), "layers", "qwen3_next"),
    "rg_lru": (loader("rg_lru"), "layers", "recurrent_gemma"),
    "latent": (LATENT, "layers", "deepseek_v2"),
    "latent of queries": (LATENT, "layers", "deepseek_v2_query_rank"),
    "reformer local": (LOCAL, "layers", "reformer_local"),
}
SLOW = "mamba2 of one group", "rwkv4 channels", "latent"


def test_local_layers_of_reformer_are_alike_and_can_be_pickled():
    parameters = golden("layers", "reformer_local")[0]
    one, other = (nnx.split(LOCAL(parameters))[0] for _ in range(2))
    assert one == other == pickle.loads(pickle.dumps(one))


@jax.jit
def run(layer, arrays):
    """Output and gradient of whole rows, and the output of decoding in parts."""
    x = arrays["x"]
    y, pull_back = jax.vjp(lambda x: layer(x), x)
    is_mixer = hasattr(layer, "step")
    state, parts = layer.init_state(len(x), *([x.shape[1]] if is_mixer else [])), []
    for part in (x[:, :5], x[:, 5:6], x[:, 6:]):
        part, state = layer.extend(part, state)
        parts.append(part)
    gradient = pull_back(arrays["cotangent"])[0] if "cotangent" in arrays else None
    return y, jnp.concatenate(parts, 1), gradient


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in DECODING])
def test_layers_agree_with_transformers_and_decode(name):
    load, file, case = DECODING[name]
    parameters, arrays = golden(file, case)
    y, decoded, gradient = run(load(parameters), arrays)
    np.testing.assert_allclose(y, arrays["output"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(decoded, arrays["output"], rtol=1e-4, atol=1e-4)
    if gradient is not None:
        np.testing.assert_allclose(gradient, arrays["gradient"], rtol=1e-4, atol=1e-4)


def test_fnet_agrees_with_transformers():
    _, arrays = golden("transformers_fnet")
    norm = {"output.LayerNorm.weight": np.ones(24), "output.LayerNorm.bias": np.zeros(24)}
    mixer = nn.fnet_from_transformers(
        {f"fourier.{n}": x for n, x in norm.items()}, prefix="fourier."
    )
    np.testing.assert_allclose(mixer(arrays["x"]), arrays["output"], rtol=1e-4, atol=1e-4)


def test_the_first_token_of_each_document_enters_in_full():
    parameters, arrays = golden("layers", "recurrent_gemma")
    mixer, x = nn.rg_lru_from_transformers(parameters), arrays["x"][:, :7]
    packed = np.concatenate([x, x], 1)
    ids = np.repeat([[3, 5]], 2, 0).repeat(7, 1)
    y = jax.jit(lambda x: mixer(x, segment_ids=ids))(packed)
    np.testing.assert_allclose(y[:, :7], arrays["output"][:, :7], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(y[:, 7:], arrays["output"][:, :7], rtol=1e-4, atol=1e-4)


def test_the_scale_of_latent_attention_is_part_of_the_queries():
    parameters, _ = golden("layers", "deepseek_v2")
    ours, other = LATENT(parameters), LATENT(parameters, scale=2 * 10**-0.5)
    np.testing.assert_allclose(other.query.kernel[...], 2 * ours.query.kernel[...], rtol=1e-6)


def changed(file, case="", **changes):
    """The parameters of a case with other entries; None leaves an entry out."""
    parameters = {**golden(file, case)[0], **changes}
    return {name: array for name, array in parameters.items() if array is not None}


def of_layer(name):
    return lambda **changes: DECODING[name][0](changed(*DECODING[name][1:], **changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: of_layer("mamba")(D=None, E=np.zeros(3)),
            "prefix '' must lead to the arrays of one layer, A_log, .*missing: D; unexpected: E$",
        ),
        (
            lambda: of_layer("mamba")(**{"x_proj.weight": np.zeros((3, 32))}),
            r"x_proj.weight must have shape \(15, 32\), got \(3, 32\)",
        ),
        (
            lambda: of_layer("mamba2")(A_log=np.zeros((4, 1))),
            r"A_log must have 1 axes, got the shape \(4, 1\)",
        ),
        (
            lambda: nn.mamba2_from_transformers(
                golden("transformers_mamba2", "two_groups")[0], num_groups=3
            ),
            "num_groups must divide the 4 heads.* got 3; pass n_groups",
        ),
        (
            lambda: of_layer("rwkv4")(**{"key.weight": np.zeros((48, 24))}),
            r"key.weight must be square, .*got \(48, 24\)",
        ),
        (
            lambda: of_layer("rwkv4 channels")(**{"time_mix_key": np.zeros(24)}),
            r"time_mix_key must have shape \(1, 1, 24\), got \(24,\)",
        ),
        (
            lambda: nn.gated_delta_net_from_transformers(
                golden("layers", "qwen3_next")[0], num_key_heads=3
            ),
            "num_key_heads must divide the 4 value heads.* got 3; pass linear_num_key_heads",
        ),
        (
            lambda: of_layer("rg_lru")(**{"rg_lru.recurrent_param": np.zeros(5)}),
            r"rg_lru.recurrent_param must have shape \(12,\), got \(5,\)",
        ),
        (
            lambda: of_layer("latent")(**{"o_proj.bias": np.zeros(16)}),
            "unexpected: o_proj.bias",
        ),
        (
            lambda: nn.latent_from_transformers(
                golden("layers", "deepseek_v2")[0], num_heads=3, head_dim=6
            ),
            "num_heads must divide the 10 features of o_proj.weight, got 3",
        ),
        (
            lambda: nn.reformer_local_from_transformers(
                golden("layers", "reformer_local")[0], num_heads=5
            ),
            "num_heads must divide the layer's 12 features, got 5",
        ),
        (
            lambda: nn.nystromformer_from_transformers({"layer.1.self.key.bias": 0}, num_heads=4),
            "missing: output.dense.bias",
        ),
        (lambda: nn.fnet_from_transformers({}), "missing: output.LayerNorm.bias"),
        (lambda: nn.fnet_from_transformers(None), "parameters must be a mapping .* got NoneType"),
        (lambda: nn.fnet_from_transformers([1]), "parameters must be a mapping .* got list"),
        (lambda: nn.fnet_from_transformers({}, prefix=None), "prefix must be a str, .* got None"),
        (lambda: of_layer("mamba")(D=np.zeros(32, complex)), "D must be .* got complex128; conv"),
        (lambda: of_layer("mamba")(D=np.zeros(32, np.int8)), "D must be .* got int8; convert"),
        (
            lambda: of_layer("mamba")(D=np.zeros(31)),
            r"D must have size 32 .* got the shape \(31,\)",
        ),
        (lambda: of_layer("mamba2")(A_log=np.zeros(0)), r"A_log must not be empty, got the shape"),
        (
            lambda: of_layer("mamba2")(A_log=np.zeros(5)),
            r"A_log must have size 4 along its axis 'heads', as D of shape \(4,\) .* \(5,\); take",
        ),
        (
            lambda: of_layer("mamba2")(
                **{"conv1d.weight": np.zeros((32, 1, 4)), "conv1d.bias": np.zeros(32)}
            ),
            r"conv1d.weight must have 32 rows for x, .* got the shape \(32, 1, 4\); take",
        ),
        (
            lambda: of_layer("gated delta")(**{"norm.weight": np.zeros(7)}),
            r"norm.weight must have size 24 / 4, .* got the shape \(7,\); take",
        ),
        (
            lambda: of_layer("gated delta")(**{"conv1d.weight": np.zeros((24, 1, 3))}),
            r"conv1d.weight must have 24 rows for values, .* got the shape \(24, 1, 3\); take",
        ),
        (
            lambda: of_layer("rg_lru")(**{"rg_lru.input_gate_weight": np.zeros((2, 4, 4))}),
            r"input_gate_weight must have shape \(N, H, H\) .* = 12, .* got the shape \(2, 4, 4\)",
        ),
        (
            lambda: of_layer("latent")(**{"kv_a_layernorm.weight": np.zeros(7)}),
            r"kv_a_layernorm.weight must have size 6 along its axis 'rank', .* shape \(7,\); take",
        ),
        (
            lambda: of_layer("latent")(**{"kv_a_proj_with_mqa.weight": np.zeros((9, 16))}),
            r"kv_a_proj_with_mqa.weight must have 6 rows for .* got the shape \(9, 16\); take",
        ),
        (
            lambda: of_layer("latent")(**{"o_proj.weight": np.zeros((0, 10))}),
            r"o_proj.weight must not be empty, got the shape \(0, 10\); take",
        ),
    ],
)
def test_entries_and_sizes_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba2", {"num_groups": "a"}, "num_groups must divide .* got 'a'; pass n_groups"),
        ("mamba2", {"norm_epsilon": -1.0}, "norm_epsilon must be a finite .* got -1.0"),
        ("gated delta", {"num_key_heads": True}, "num_key_heads must divide .* got True; pass"),
        ("gated delta", {"norm_epsilon": "x"}, "norm_epsilon must be a finite .* got 'x'"),
        ("latent", {"num_heads": None}, "num_heads must divide .* got None; pass"),
        ("latent", {"head_dim": "a"}, "head_dim must be an int, 1 or more features, got 'a'"),
        ("latent", {"scale": "a"}, "scale must be a number .* got 'a'"),
        ("latent", {"norm_epsilon": 0}, "norm_epsilon must be a finite .* got 0"),
        ("reformer local", {"num_heads": "a"}, "num_heads must divide .* got 'a'; pass"),
        ("reformer local", {"chunk_length": 0}, "chunk_length must be an int, 1 or more .* got 0"),
        ("reformer local", {"chunks_before": -1}, "chunks_before must be an int, 0 .* got -1"),
        ("reformer local", {"chunks_after": "a"}, "chunks_after must be an int, 0 .* got 'a'"),
    ],
)
def test_options_of_a_wrong_type_or_range_are_named(name, options, message):
    load, file, case = DECODING[name]
    with pytest.raises(ValueError, match=message):
        load(golden(file, case)[0], **options)


@pytest.mark.parametrize("num_landmarks", [0, 2.5, "a"])
def test_landmarks_are_checked_at_once(num_landmarks):
    with pytest.raises(ValueError, match="num_landmarks must be an int, 1 or more, got"):
        nn.nystromformer_from_transformers({}, num_heads=4, num_landmarks=num_landmarks)


def test_buckets_of_reformer_may_be_an_int_of_numpy():
    layer = {n: np.zeros((8, 8)) for n in ("self_attention.query_key", "self_attention.value")}
    layer["output.dense"] = np.zeros((8, 8))
    parameters = {f"{name}.weight": array for name, array in layer.items()}
    load = functools.partial(nn.reformer_lsh_from_transformers, parameters, num_heads=2)
    assert load(num_buckets=np.int64(8)).factors == load(num_buckets=8).factors
