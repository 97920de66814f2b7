"""Loaders for pretrained mixers of Hugging Face transformers: recurrences, hashing and others."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.nn.channel_mixing import RWKV4ChannelMix
from effattn.nn.fnet import FNet
from effattn.nn.gated_delta_net import GatedDeltaNet
from effattn.nn.latent import LatentAttention
from effattn.nn.lsh import LSHSelfAttention
from effattn.nn.mamba import Mamba
from effattn.nn.mamba2 import Mamba2
from effattn.nn.pretrained import array_of, some
from effattn.nn.rg_lru import RGLRU
from effattn.nn.rotary import RotaryEmbedding
from effattn.nn.rwkv4 import RWKV4
from effattn.nn.self_attention import SelfAttention

_KINDS = "weight", "bias"


class _Layer:
    """The arrays of one layer of transformers, by their names after the prefix.

    Args:
      parameters: mapping of names to arrays.
      prefix: the part of the names before those of the layer.
      names: the names that the layer has.
      ignored: names that the layer may have and that are not loaded.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        prefix: str,
        names: Iterable[str],
        ignored: Iterable[str] = (),
    ):
        needed = set(names)
        found = {name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
        lists = {
            "missing": sorted(needed - found),
            "unexpected": sorted(found - needed - set(ignored)),
        }
        if any(lists.values()):
            wrong = "; ".join(f"{which}: {some(names)}" for which, names in lists.items() if names)
            first = min(needed)
            others = [n.removesuffix(first) for n in parameters if n.endswith(first)]
            others = [repr(other) for other in others if other != prefix]
            known = f"; such layers are under the prefixes {some(others)}" if others else ""
            raise ValueError(
                f"prefix {prefix!r} must lead to the arrays of one layer, {some(sorted(needed))}; "
                f"{wrong}{known}"
            )
        self.parameters, self.prefix, self.names = parameters, prefix, found

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of an array that must have so many axes."""
        shape = np.shape(self.parameters[self.prefix + name])
        if len(shape) != axes:
            raise ValueError(f"{self.prefix}{name} must have {axes} axes, got the shape {shape}")
        return shape

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """The array of a name, of this shape."""
        return array_of(self.parameters, self.prefix + name, shape)

    def kernel(self, name: str, features_in: int, features_out: int) -> np.ndarray:
        """The kernel `(in, out)` of a linear layer, which torch stores as `(out, in)`."""
        return self(name, features_out, features_in).T

    def taps(self, name: str, features: int, width: int) -> np.ndarray:
        """The taps `(width, D)` of a convolution of each feature, in torch `(D, 1, width)`."""
        return self(name, features, 1, width)[:, 0].T


def _filled(mixer: Any, arrays: Iterable[tuple[Any, np.ndarray]]) -> Any:
    """The module, with its parameters replaced by arrays of the same sizes, in any shape."""
    for parameter, array in arrays:
        value = parameter[...]
        parameter[...] = jnp.asarray(array, value.dtype).reshape(value.shape)
    return mixer


def mamba_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> Mamba:
    """Loads a pretrained Mamba mixer (`MambaMixer` of transformers) into an equivalent module.

        model = transformers.AutoModel.from_pretrained("state-spaces/mamba-130m-hf")
        mixer = mamba_from_transformers(model.state_dict(), prefix="layers.0.mixer.")

    Args:
      parameters: mapping of names to arrays: a `state_dict()`, or the result of
        `safetensors.numpy.load_file`. Arrays may be from NumPy, JAX or torch.
      prefix: the part of the names before `in_proj.weight`.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.

    Returns:
      A `Mamba` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    names = "A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias"
    projections = "in_proj.weight", "x_proj.weight", "out_proj.weight"
    read = _Layer(parameters, prefix, (*names, *projections))
    inner, states = read.shape("A_log", 2)
    features, width = read.shape("out_proj.weight", 2)[0], read.shape("conv1d.weight", 3)[2]
    rank = read.shape("dt_proj.weight", 2)[1]
    arrays = (
        read.kernel("in_proj.weight", features, 2 * inner),
        read.taps("conv1d.weight", inner, width),
        read("conv1d.bias", inner),
        read.kernel("x_proj.weight", inner, rank + 2 * states),
        read.kernel("dt_proj.weight", rank, inner),
        read("dt_proj.bias", inner),
        read("A_log", inner, states),
        read("D", inner),
        read.kernel("out_proj.weight", inner, features),
    )
    mixer = Mamba(
        features,
        head_dim=inner,
        state_size=states,
        step_rank=rank,
        convolution_width=width,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    ours = (
        mixer.project.kernel,
        mixer.convolution.taps,
        mixer.convolution.bias,
        mixer.select.kernel,
        mixer.step_projection.kernel,
        mixer.step_bias,
        mixer.log_rate,
        mixer.skip,
        mixer.out.kernel,
    )
    return _filled(mixer, zip(ours, arrays, strict=True))


def mamba2_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_groups: int,
    norm_epsilon: float = 1e-5,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> Mamba2:
    """Loads a pretrained Mamba-2 mixer (`Mamba2Mixer` of transformers) into an equivalent module.

        mixer = mamba2_from_transformers(
            model.state_dict(), prefix="backbone.layers.0.mixer.", num_groups=model.config.n_groups)

    Args:
      parameters: as in `mamba_from_transformers`.
      num_groups: `n_groups` of the transformers config.
      norm_epsilon: `layer_norm_epsilon` of the transformers config.
      prefix: the part of the names before `in_proj.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      A `Mamba2` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        sizes do not fit `num_groups`.
    """
    names = "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"
    read = _Layer(parameters, prefix, (*names, "in_proj.weight", "out_proj.weight"))
    (heads,), (inner,) = read.shape("A_log", 1), read.shape("norm.weight", 1)
    features = read.shape("out_proj.weight", 2)[0]
    convolved, _, width = read.shape("conv1d.weight", 3)
    shared = convolved - inner
    if num_groups < 1 or inner % heads or heads % num_groups or shared % (2 * num_groups):
        raise ValueError(
            f"num_groups must divide the {heads} heads, and half of the {shared} features of B and "
            f"C, got {num_groups}; pass n_groups of the model's config"
        )
    arrays = (
        read.kernel("in_proj.weight", features, inner + convolved + heads),
        read.taps("conv1d.weight", convolved, width),
        read("conv1d.bias", convolved),
        read("A_log", heads),
        read("dt_bias", heads),
        read("D", heads),
        read("norm.weight", inner),
        read.kernel("out_proj.weight", inner, features),
    )
    mixer = Mamba2(
        features,
        heads,
        head_dim=inner // heads,
        state_size=shared // 2 // num_groups,
        num_kv_heads=num_groups,
        convolution_width=width,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    mixer.norm.epsilon = norm_epsilon
    ours = (
        mixer.project.kernel,
        mixer.convolution.taps,
        mixer.convolution.bias,
        mixer.log_rate,
        mixer.step_bias,
        mixer.skip,
        mixer.norm_scale,
        mixer.out.kernel,
    )
    return _filled(mixer, zip(ours, arrays, strict=True))


def rwkv4_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> RWKV4:
    """Loads the pretrained time mixing of RWKV-4 (`RwkvSelfAttention` of transformers).

        mixer = rwkv4_from_transformers(model.state_dict(), prefix="rwkv.blocks.0.attention.")

    In evaluation, a transformers model divides weights of later layers by powers of 2
    (`rescale_every`). So pass its `state_dict()` before the first call, or the arrays of a file.

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `time_decay`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      An `RWKV4` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    inputs = "receptance", "key", "value"
    read = _Layer(
        parameters,
        prefix,
        (
            *("time_decay", "time_first"),
            *(f"time_mix_{name}" for name in inputs),
            *(f"{name}.weight" for name in (*inputs, "output")),
        ),
    )
    inner, features = read.shape("key.weight", 2)
    if inner != features:
        raise ValueError(
            f"{prefix}key.weight must be square, because RWKV4 has as many inner features as a "
            f"token has, got {(inner, features)}"
        )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
    mixer = RWKV4(features, **options)
    shifts = [read(f"time_mix_{name}", 1, 1, features).ravel() for name in inputs]
    kernels = [read.kernel(f"{name}.weight", features, features) for name in (*inputs, "output")]
    ours = mixer.receptance.kernel, mixer.key.kernel, mixer.value.kernel, mixer.out.kernel
    rates = read("time_decay", features), read("time_first", features)
    return _filled(
        mixer,
        [
            (mixer.shifts, np.stack(shifts)),
            *zip((mixer.log_decay, mixer.bonus), rates, strict=True),
            *zip(ours, kernels, strict=True),
        ],
    )


def rwkv4_channel_mix_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> RWKV4ChannelMix:
    """Loads the pretrained channel mixing of RWKV-4 (`RwkvFeedForward` of transformers).

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `key.weight`, such as "rwkv.blocks.0.feed_forward.".
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      An `RWKV4ChannelMix` layer.

    Raises:
      ValueError: as `rwkv4_from_transformers`.
    """
    mixed, layers = ("receptance", "key"), ("receptance", "key", "value")
    names = (*(f"time_mix_{name}" for name in mixed), *(f"{name}.weight" for name in layers))
    read = _Layer(parameters, prefix, names)
    hidden, features = read.shape("key.weight", 2)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
    layer = RWKV4ChannelMix(features, hidden, **options)
    shifts = [read(f"time_mix_{name}", 1, 1, features).ravel() for name in mixed]
    return _filled(
        layer,
        [
            (layer.shifts, np.stack(shifts)),
            (layer.receptance.kernel, read.kernel("receptance.weight", features, features)),
            (layer.key.kernel, read.kernel("key.weight", features, hidden)),
            (layer.value.kernel, read.kernel("value.weight", hidden, features)),
        ],
    )


def gated_delta_net_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_key_heads: int,
    norm_epsilon: float = 1e-6,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> GatedDeltaNet:
    """Loads a pretrained Gated DeltaNet of Qwen3-Next (`Qwen3NextGatedDeltaNet` of transformers).

        mixer = gated_delta_net_from_transformers(
            model.state_dict(), prefix="model.layers.0.linear_attn.",
            num_key_heads=model.config.linear_num_key_heads)

    In Qwen3-Next, several value heads share a query and a key, and have gates of their own. Here,
    each value head has its own copy of the query and key projections.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_key_heads: `linear_num_key_heads` of the transformers config.
      norm_epsilon: `rms_norm_eps` of the transformers config.
      prefix: the part of the names before `in_proj_qkvz.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      A `GatedDeltaNet` with as many heads as there are value heads.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        sizes do not fit `num_key_heads`.
    """
    projections = "in_proj_qkvz.weight", "in_proj_ba.weight", "out_proj.weight"
    names = "A_log", "dt_bias", "conv1d.weight", "norm.weight"
    read = _Layer(parameters, prefix, (*names, *projections))
    (heads,), (value_dim,) = read.shape("A_log", 1), read.shape("norm.weight", 1)
    features = read.shape("out_proj.weight", 2)[0]
    convolved, _, width = read.shape("conv1d.weight", 3)
    of_keys = convolved - heads * value_dim
    if num_key_heads < 1 or heads % num_key_heads or of_keys % (2 * num_key_heads):
        raise ValueError(
            f"num_key_heads must divide the {heads} value heads, and half of the {of_keys} "
            f"features of queries and keys, got {num_key_heads}; pass linear_num_key_heads of the "
            "model's config"
        )
    shared, head_dim = heads // num_key_heads, of_keys // 2 // num_key_heads

    def of_value_heads(array):
        """Copies of `(..., key heads, H)` for the value heads that share them."""
        return np.repeat(array, shared, -2)

    both = read.kernel("in_proj_qkvz.weight", features, of_keys + 2 * heads * value_dim)
    sizes = np.cumsum([head_dim, head_dim, shared * value_dim])
    query, key, value, gate = np.split(both.reshape(features, num_key_heads, -1), sizes, -1)
    gates = read.kernel("in_proj_ba.weight", features, 2 * heads)
    strength, step = np.split(gates.reshape(features, num_key_heads, 2 * shared), 2, -1)
    taps = read.taps("conv1d.weight", convolved, width)
    of_query, of_key, of_value = np.split(taps, [of_keys // 2, of_keys], -1)
    by_head = width, num_key_heads, head_dim
    mixer = GatedDeltaNet(
        features,
        heads,
        head_dim=head_dim,
        value_dim=value_dim,
        convolution_width=width,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    mixer.norm.epsilon = norm_epsilon
    return _filled(
        mixer,
        [
            (mixer.query.kernel, of_value_heads(query)),
            (mixer.key.kernel, of_value_heads(key)),
            (mixer.value.kernel, value),
            (mixer.gate.kernel, gate),
            (mixer.strength.kernel, strength),
            (mixer.step_size.kernel, step),
            (mixer.query_convolution.taps, of_value_heads(of_query.reshape(by_head))),
            (mixer.key_convolution.taps, of_value_heads(of_key.reshape(by_head))),
            (mixer.value_convolution.taps, of_value),
            (mixer.log_rate, read("A_log", heads)),
            (mixer.step_bias, read("dt_bias", heads)),
            (mixer.norm.scale, read("norm.weight", value_dim)),
            (mixer.out.kernel, read.kernel("out_proj.weight", heads * value_dim, features)),
        ],
    )


def rg_lru_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> RGLRU:
    """Loads a pretrained recurrent block of RecurrentGemma (`RecurrentGemmaRecurrentBlock`).

        mixer = rg_lru_from_transformers(
            model.state_dict(), prefix="model.layers.0.temporal_block.")

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `linear_x.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      An `RGLRU` with `first_in_full`.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    layers = {"project": "linear_x", "gate": "linear_y", "out": "linear_out"}
    gates = {"recurrence": "rg_lru.recurrent_gate", "input": "rg_lru.input_gate"}
    names = [f"{name}.{kind}" for name in (*layers.values(), "conv_1d") for kind in _KINDS]
    names += [f"{name}_{kind}" for name in gates.values() for kind in _KINDS]
    read = _Layer(parameters, prefix, (*names, "rg_lru.recurrent_param"))
    heads, size, _ = read.shape("rg_lru.input_gate_weight", 3)
    inner, _, width = read.shape("conv_1d.weight", 3)
    features = read.shape("linear_x.weight", 2)[1]
    mixer = RGLRU(
        features,
        heads,
        head_dim=size,
        convolution_width=width,
        first_in_full=True,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    arrays = [
        (mixer.convolution.taps, read.taps("conv_1d.weight", inner, width)),
        (mixer.convolution.bias, read("conv_1d.bias", inner)),
        (mixer.rate, read("rg_lru.recurrent_param", heads * size)),
    ]
    for ours, theirs in layers.items():
        layer, sizes = getattr(mixer, ours), (features, inner)
        sizes = sizes[::-1] if ours == "out" else sizes
        arrays.append((layer.kernel, read.kernel(f"{theirs}.weight", *sizes)))
        arrays.append((layer.bias, read(f"{theirs}.bias", sizes[1])))
    for ours, theirs in gates.items():
        arrays.append((getattr(mixer, f"{ours}_gate"), read(f"{theirs}_weight", heads, size, size)))
        arrays.append((getattr(mixer, f"{ours}_bias"), read(f"{theirs}_bias", heads, size)))
    return _filled(mixer, arrays)


def latent_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    head_dim: int,
    rotary: RotaryEmbedding | None = None,
    scale: float | None = None,
    norm_epsilon: float = 1e-6,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> LatentAttention:
    """Loads pretrained latent attention of DeepSeek-V2 (`DeepseekV2Attention` of transformers).

        mixer = latent_from_transformers(
            model.state_dict(), prefix="model.layers.0.self_attn.", num_heads=16,
            head_dim=model.config.qk_nope_head_dim)

    The model rotates the pairs of neighbouring features; here the features of each pair lie half a
    head apart, so the loader reorders the rotary features of queries and keys.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      head_dim: `qk_nope_head_dim` of the transformers config.
      rotary: the rotary embedding of the model; default `RotaryEmbedding()`.
      scale: `scaling` of the transformers layer, which differs from the default in models with a
        YaRN `mscale_all_dim`; default 1 over the square root of the features of a query head.
      norm_epsilon: epsilon of the norms of the latents.
      prefix: the part of the names before `kv_b_proj.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      A causal `LatentAttention`. The factor of another `scale` is part of its query projection.

    Raises:
      ValueError: a name under the prefix is missing or unexpected (biases, too), an array has
        another shape, or sizes do not fit `num_heads` and `head_dim`.
    """
    compressed = f"{prefix}q_a_proj.weight" in parameters
    of_query = ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight")
    names = "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight"
    names = (*names, "o_proj.weight", *(of_query if compressed else ("q_proj.weight",)))
    read = _Layer(parameters, prefix, names)
    (rank,) = read.shape("kv_a_layernorm.weight", 1)
    features, of_heads = read.shape("o_proj.weight", 2)
    rotary_dim = read.shape("kv_a_proj_with_mqa.weight", 2)[0] - rank
    if num_heads < 1 or of_heads % num_heads:
        raise ValueError(
            f"num_heads must divide the {of_heads} features of {prefix}o_proj.weight, got "
            f"{num_heads}; pass num_attention_heads of the model's config"
        )
    value_dim, query_dim = of_heads // num_heads, head_dim + rotary_dim
    query_rank = read.shape("q_a_layernorm.weight", 1)[0] if compressed else None
    mixer = LatentAttention(
        features,
        num_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        rotary_dim=rotary_dim,
        kv_rank=rank,
        query_rank=query_rank,
        rotary=RotaryEmbedding() if rotary is None else rotary,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )

    def halves(array):
        """The features (0, 1), (2, 3), ... of pairs as two halves, (0, 2, ...) and (1, 3, ...)."""
        return np.concatenate([array[..., ::2], array[..., 1::2]], -1)

    name = "q_b_proj.weight" if compressed else "q_proj.weight"
    kernel = read.kernel(name, query_rank or features, num_heads * query_dim)
    plain, turned = np.split(kernel.reshape(-1, num_heads, query_dim), [head_dim], -1)
    factor = 1.0 if scale is None else scale * query_dim**0.5
    latent = read.kernel("kv_a_proj_with_mqa.weight", features, rank + rotary_dim)
    expand = read.kernel("kv_b_proj.weight", rank, num_heads * (head_dim + value_dim))
    key, value = np.split(expand.reshape(rank, num_heads, head_dim + value_dim), [head_dim], -1)
    mixer.latent_norm.epsilon = norm_epsilon
    arrays = [
        (mixer.query.kernel, factor * np.concatenate([plain, halves(turned)], -1)),
        (mixer.latent.kernel, latent[:, :rank]),
        (mixer.rotary_key.kernel, halves(latent[:, rank:])),
        (mixer.latent_norm.scale, read("kv_a_layernorm.weight", rank)),
        (mixer.key.kernel, key),
        (mixer.value.kernel, value),
        (mixer.out.kernel, read.kernel("o_proj.weight", of_heads, features)),
    ]
    if mixer.query_latent is not None and mixer.query_norm is not None:
        assert query_rank is not None
        mixer.query_norm.epsilon = norm_epsilon
        arrays += [
            (mixer.query_latent.kernel, read.kernel("q_a_proj.weight", features, query_rank)),
            (mixer.query_norm.scale, read("q_a_layernorm.weight", query_rank)),
        ]
    return _filled(mixer, arrays)


def nystromformer_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    num_landmarks: int = 64,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> SelfAttention:
    """Loads a pretrained Nystromformer layer (`NystromformerAttention` of transformers).

        mixer = nystromformer_from_transformers(
            model.state_dict(), prefix="nystromformer.encoder.layer.0.attention.", num_heads=12)

    As in `longformer_from_transformers`, the mixer returns the update that the layer adds to its
    input. Without padding, it agrees with a transformers layer whose `init_option` is "exact". By
    default, transformers scales the start of the iterative inverse by the largest column sum of all
    heads and examples, not of each one; after the same 6 steps, both are close to the inverse.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      num_landmarks: `num_landmarks` of the transformers config.
      prefix: the part of the names before `self.query.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      A bidirectional `SelfAttention` with biases, and with the convolution of the values if the
      layer has one.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        heads that do not divide the features.
    """
    layers = {name: f"self.{name}" for name in ("query", "key", "value")} | {"out": "output.dense"}
    names = [f"{name}.{kind}" for name in layers.values() for kind in _KINDS]
    convolution = "self.conv.weight"
    has_convolution = prefix + convolution in parameters
    names += [convolution] if has_convolution else []
    norm = "output.LayerNorm.weight", "output.LayerNorm.bias"
    read = _Layer(parameters, prefix, names, ignored=norm)
    features = read.shape("self.query.weight", 2)[1]
    _check_heads(num_heads, features)
    options: dict[str, Any] = {}
    if has_convolution:
        width = read.shape(convolution, 4)[2]
        taps = read(convolution, num_heads, 1, width, 1)[:, 0, :, 0]
        options["skip_kernel"] = nnx.Param(jnp.asarray(taps, param_dtype))
    mixer = SelfAttention(
        features,
        num_heads,
        "nystrom",
        num_landmarks=num_landmarks,
        is_causal=False,
        use_bias=True,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
        **options,
    )
    arrays = []
    for ours, theirs in layers.items():
        layer = getattr(mixer, ours)
        arrays.append((layer.kernel, read.kernel(f"{theirs}.weight", features, features)))
        arrays.append((layer.bias, read(f"{theirs}.bias", features)))
    return _filled(mixer, arrays)


def fnet_from_transformers(
    parameters: Mapping[str, Any], *, prefix: str = "", dtype: Any = None
) -> FNet:
    """Loads the Fourier transform of a pretrained FNet layer (`FNetFourierTransform`).

        mixer = fnet_from_transformers(model.state_dict(), prefix="encoder.layer.0.fourier.")

    The transform has no parameters: the loader reads the number of features from the layer's norm.
    The mixer returns the update that the layer adds to its input before the norm.

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `output.LayerNorm.weight`.
      dtype: as in `mamba_from_transformers`.

    Returns:
      An `FNet` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    read = _Layer(parameters, prefix, ("output.LayerNorm.weight", "output.LayerNorm.bias"))
    (features,) = read.shape("output.LayerNorm.weight", 1)
    read("output.LayerNorm.bias", features)
    return FNet(features, dtype=dtype)


def reformer_lsh_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    num_buckets: int | tuple[int, ...],
    num_rounds: int = 1,
    chunk_length: int = 64,
    is_causal: bool = True,
    rotations: Any = None,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> LSHSelfAttention:
    """Loads a pretrained Reformer layer with hashing (`ReformerAttention` of transformers).

        mixer = reformer_lsh_from_transformers(
            model.state_dict(), prefix="reformer.encoder.layers.1.attention.", num_heads=2,
            num_buckets=(64, 128))

    The mixer returns the update that the layer adds to its input; the norm before it is not loaded.
    With one round and the same `rotations`, it agrees with a transformers layer whose chunks attend
    to themselves and to one chunk before. With more rounds, the mixer counts each pair once, as in
    the paper; transformers counts it in each round in which it occurs.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      num_buckets: `num_buckets` of the transformers config, an int or a tuple of factors.
      num_rounds: `num_hashes` of the transformers config.
      chunk_length: `lsh_attn_chunk_length` of the transformers config.
      is_causal: `is_decoder` of the transformers config.
      rotations: `(N, num_rounds, H, columns)`, replaces the random rotations, which transformers
        draws anew in each call.
      prefix: the part of the names before `self_attention.query_key.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      An `LSHSelfAttention`.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        heads that do not divide the features.
    """
    read, features, inner = _reformer(parameters, prefix, ("query_key", "value"), num_heads)
    mixer = LSHSelfAttention(
        features,
        num_heads,
        head_dim=inner // num_heads,
        num_rounds=num_rounds,
        num_buckets=num_buckets,
        chunk_length=chunk_length,
        is_causal=is_causal,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    arrays = [
        (mixer.query_key.kernel, read.kernel("self_attention.query_key.weight", features, inner)),
        (mixer.value.kernel, read.kernel("self_attention.value.weight", features, inner)),
        (mixer.out.kernel, read.kernel("output.dense.weight", inner, features)),
    ]
    if rotations is not None:
        shape = mixer.rotations[...].shape
        arrays.append((mixer.rotations, array_of({"rotations": rotations}, "rotations", shape)))
    return _filled(mixer, arrays)


def reformer_local_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    chunk_length: int = 64,
    chunks_before: int = 1,
    chunks_after: int = 0,
    is_causal: bool = True,
    prefix: str = "",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> SelfAttention:
    """Loads a pretrained local Reformer layer (`ReformerAttention` of transformers).

    A token attends to its chunk and to the chunks before and after it, by block-sparse attention.
    The mixer returns the update that the layer adds to its input; the norm before it is not loaded.
    In bidirectional layers of transformers, the first chunk also reads the last one, as if the
    chunks were a ring; here it does not.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      chunk_length: `local_attn_chunk_length` of the transformers config.
      chunks_before: `local_num_chunks_before` of the transformers config.
      chunks_after: `local_num_chunks_after` of the transformers config.
      is_causal: `is_decoder` of the transformers config.
      prefix: the part of the names before `self_attention.query.weight`.
      dtype: as in `mamba_from_transformers`.
      param_dtype: as in `mamba_from_transformers`.

    Returns:
      A `SelfAttention` with the mechanism "block_sparse".

    Raises:
      ValueError: as `reformer_lsh_from_transformers`.
    """
    layers = "query", "key", "value"
    read, features, inner = _reformer(parameters, prefix, layers, num_heads)
    mixer = SelfAttention(
        features,
        num_heads,
        "block_sparse",
        head_dim=inner // num_heads,
        block_size=chunk_length,
        block_mask=lambda m, n: (m - n <= chunks_before) & (n - m <= chunks_after),
        is_causal=is_causal,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
    )
    arrays = [(mixer.out.kernel, read.kernel("output.dense.weight", inner, features))]
    for name in layers:
        kernel = read.kernel(f"self_attention.{name}.weight", features, inner)
        arrays.append((getattr(mixer, name).kernel, kernel))
    return _filled(mixer, arrays)


def _reformer(
    parameters: Mapping[str, Any], prefix: str, layers: tuple[str, ...], num_heads: int
) -> tuple[_Layer, int, int]:
    """The arrays of a Reformer layer, and the features of a token and of all heads together."""
    names = [f"self_attention.{name}.weight" for name in layers]
    norm = "layer_norm.weight", "layer_norm.bias"
    read = _Layer(parameters, prefix, [*names, "output.dense.weight"], ignored=norm)
    inner, features = read.shape(names[0], 2)
    _check_heads(num_heads, inner)
    return read, features, inner


def _check_heads(num_heads: int, features: int) -> None:
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"num_heads must divide the layer's {features} features, got {num_heads}; pass "
            "num_attention_heads of the model's config"
        )
