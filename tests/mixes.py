"""Naive forms of mixers without heads: the projections of a mixer around its mechanism."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry


def naive(name):
    """The naive form of a mechanism, without the checks of the fast function."""
    return registry.get(name).naive


def attention_free(name, bias=lambda mixer: None):
    """Naive form of the mixer `name`; `bias(mixer)` returns its `position_bias`."""

    def mix(mixer, x):
        q, k, v = (x[None] @ layer.kernel[...] for layer in (mixer.query, mixer.key, mixer.value))
        (y,) = naive(name)(
            q,
            k,
            v,
            position_bias=bias(mixer),
            local_window_size=getattr(mixer, "window", None),
            is_causal=mixer.is_causal,
        )
        return y @ mixer.out.kernel[...]

    return mix


def factors(mixer):
    return mixer.row_bias[...], mixer.column_bias[...]


def gmlp(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    z = jax.nn.gelu(x @ mixer.project.kernel[...])
    gate, value = jnp.split(z.astype(wide), 2, -1)
    value = value - value.mean(-1, keepdims=True)
    value = value / jnp.sqrt(jnp.square(value).mean(-1, keepdims=True) + 1e-6)
    value = (value * mixer.norm.scale[...] + mixer.norm.bias[...]).astype(x.dtype)
    (y,) = naive("gmlp")(
        gate[None].astype(x.dtype),
        value[None],
        mixer.weights[...],
        mixer.bias[...],
        is_causal=mixer.is_causal,
    )
    return y @ mixer.out.kernel[...]


WINDOW = 2


def plain(mixer, **options):
    """A mixer of softmax attention by its naive form."""

    def mix(x):
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x, layer.kernel[...])
            for layer in (mixer.query, mixer.key, mixer.value)
        )
        y = naive("softmax")(query, key, value, is_causal=mixer.is_causal, **options)
        return jnp.einsum("btnh,nhd->btd", y, mixer.out.kernel[...])

    return mix


def mixture(mixer, x):
    near, far = mixer.mixers
    mixers = plain(near, local_window_size=WINDOW), plain(far)
    parts = {name: getattr(mixer, name) for name in ("choose", "gate", "capacity")}
    inside = SimpleNamespace(mixers=mixers, **parts)
    return naive("mixture_of_mechanisms")(inside, x)


def convolve_and_attend(mixer, x):
    names = "project", "convolution", "out", "combination", "is_causal"
    attend = plain(mixer.attention)
    attend.value = lambda x: jnp.einsum("btd,dnh->btnh", x, mixer.attention.value.kernel[...])
    inside = SimpleNamespace(attention=attend, **{name: getattr(mixer, name) for name in names})
    return naive("convolution_attention")(inside, x)


def hyena_filters(mixer, dtype):
    length, order = mixer.max_length, mixer.order
    t = jnp.arange(length, dtype=dtype)[:, None] / length
    k = jnp.arange(1, mixer.num_harmonics + 1)
    hidden = jnp.concatenate([t, jnp.cos(2 * np.pi * k * t), -jnp.sin(2 * np.pi * k * t)], 1)
    for layer, frequency in zip(mixer.filter_layers, mixer.frequency[...], strict=True):
        hidden = jnp.sin(frequency * (hidden @ layer.kernel[...] + layer.bias[...]))
    taps = (hidden @ mixer.filter_out.kernel[...]).reshape(length, order, -1)
    slow, fast = np.log(100) / 1.5, np.log(100) / 0.3
    rates = fast + (slow - fast) * jnp.arange(taps.shape[-1]) / (taps.shape[-1] - 1)
    return taps * (jnp.exp(-t * rates) + mixer.window_shift)[:, None]


def hyena(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    projected = (x @ mixer.project.kernel[...]).astype(wide)
    short, width = mixer.convolution.taps[...].astype(wide), mixer.convolution.width
    padded = jnp.pad(projected, ((width - 1, 0), (0, 0)))
    streams = sum(short[j] * padded[j : j + len(x)] for j in range(width))
    streams = (streams + mixer.convolution.bias[...].astype(wide)).astype(x.dtype)
    *gates, value = jnp.split(streams, mixer.order + 1, -1)
    taps = jnp.moveaxis(hyena_filters(mixer, wide), 1, 0)
    gates = jnp.stack(gates)[:, None]
    (z,) = naive("hyena")(gates, value[None], taps, skip=mixer.skip[...])
    return z @ mixer.out.kernel[...]


def long_convolution(mixer, x):
    (y,) = naive("long_convolution")(
        x[None],
        mixer.filter[...],
        skip=mixer.skip[...],
        threshold=mixer.threshold,
        smoothing=mixer.smoothing,
        is_causal=mixer.is_causal,
    )
    return jax.nn.glu(jax.nn.gelu(y) @ mixer.out.kernel[...])


def talking_heads(mixer, x):
    query, key, value = (
        jnp.einsum("td,dnh->tnh", x, layer.kernel[...])[None]
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    (y,) = naive("talking_heads")(
        query,
        key,
        value,
        logits_mix=mixer.logits_mix[...],
        weights_mix=mixer.weights_mix[...],
        is_causal=mixer.is_causal,
    )
    return jnp.einsum("tnh,nhd->td", y, mixer.out.kernel[...])


def rwkv4(mixer, x):
    before = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    r, k, v = (
        (amount * x + (1 - amount) * before) @ layer.kernel[...]
        for amount, layer in zip(
            mixer.shifts[...], (mixer.receptance, mixer.key, mixer.value), strict=True
        )
    )
    decay = jnp.exp(mixer.log_decay[...].astype(jnp.promote_types(x.dtype, jnp.float32)))
    (average,) = naive("rwkv4")(k[None], v[None], decay=decay, bonus=mixer.bonus[...])
    return (jax.nn.sigmoid(r) * average) @ mixer.out.kernel[...]


def rg_lru(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    projected = (x @ mixer.project.kernel[...] + mixer.project.bias[...]).astype(wide)
    taps, width = mixer.convolution.taps[...].astype(wide), mixer.convolution.width
    padded = jnp.pad(projected, ((width - 1, 0), (0, 0)))
    u = sum(taps[j] * padded[j : j + len(x)] for j in range(width))
    u = (u + mixer.convolution.bias[...].astype(wide)).astype(x.dtype)

    def gate(weights, bias):
        blocks = zip(jnp.split(u, mixer.num_heads, 1), weights[...], bias[...], strict=True)
        return jax.nn.sigmoid(jnp.concatenate([part @ w + b for part, w, b in blocks], 1))

    (h,) = naive("rg_lru")(
        u[None],
        gate(mixer.recurrence_gate, mixer.recurrence_bias)[None],
        gate(mixer.input_gate, mixer.input_bias)[None],
        log_decay=-jax.nn.softplus(mixer.rate[...].astype(wide)),
    )
    opened = jax.nn.gelu(x @ mixer.gate.kernel[...] + mixer.gate.bias[...])
    return (opened * h) @ mixer.out.kernel[...] + mixer.out.bias[...]


def s4d(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    output_real, output_imag = mixer.output[...].astype(wide)
    (y,) = naive("s4d")(
        x[None],
        rate=-jnp.exp(mixer.log_rate[...].astype(wide)) + 1j * mixer.turn[...].astype(wide),
        output=output_real + 1j * output_imag,
        step_size=jnp.exp(mixer.log_step[...].astype(wide)),
        skip=mixer.skip[...],
    )
    return jax.nn.glu(jax.nn.gelu(y) @ mixer.out.kernel[...])


def s5(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def modes(pair):
        return pair[0].astype(wide) + 1j * pair[1].astype(wide)

    (y,) = naive("s5")(
        x[None],
        rate=modes((-jnp.exp(mixer.log_rate[...].astype(wide)), mixer.turn[...])),
        input=modes(mixer.input[...]),
        output=modes(mixer.output[...]),
        step_size=jnp.exp(mixer.log_step[...].astype(wide)),
        skip=mixer.skip[...],
        is_causal=mixer.is_causal,
    )
    y = jax.nn.gelu(y)
    return y * jax.nn.sigmoid(y @ mixer.gate.kernel[...])


def h3(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    key = (x @ mixer.key.kernel[...]).astype(wide)
    taps, width = mixer.shift.taps[...].astype(wide), mixer.shift.width
    padded = jnp.pad(key, ((width - 1, 0), (0, 0)))
    key = sum(taps[j] * padded[j : j + len(x)] for j in range(width)).astype(x.dtype)
    output_real, output_imag = mixer.output[...].astype(wide)
    (y,) = naive("h3")(
        (x @ mixer.query.kernel[...])[None],
        key[None],
        (x @ mixer.value.kernel[...])[None],
        rate=-jnp.exp(mixer.log_rate[...].astype(wide)) + 1j * mixer.turn[...].astype(wide),
        output=output_real + 1j * output_imag,
        step_size=jnp.exp(mixer.log_step[...].astype(wide)),
        skip=mixer.skip[...],
    )
    return y @ mixer.out.kernel[...]


def synthesizer(mixer, x):
    def heads(layer):
        y = jnp.einsum("td,dnh->tnh", x, layer.kernel[...])
        return (y if layer.bias is None else y + layer.bias[...])[None]

    def rows(table):
        return table[...][: len(x)]

    value, options = heads(mixer.value), {"is_causal": mixer.is_causal}
    if mixer.kind == "factorized":
        coarse, fine = heads(mixer.coarse), heads(mixer.fine)
        y = naive("synthesizer_factorized")(coarse, fine, value, **options)
    elif mixer.kind == "factorized_random":
        hidden, table = rows(mixer.rows)[None], rows(mixer.table)
        y = naive("synthesizer_factorized_random")(hidden, table, value, **options)
    elif mixer.kind == "dense":
        hidden, table = jax.nn.relu(heads(mixer.hidden)), rows(mixer.table)
        y = naive("synthesizer")(hidden, table, value, **options)
    else:
        share = jax.nn.sigmoid(mixer.mixture[...])[:, None]
        hidden = share * jax.nn.relu(heads(mixer.hidden))
        query = (1 - share) * heads(mixer.query) * mixer.head_dim**-0.5
        hidden = jnp.concatenate([hidden, query], -1)
        table = jnp.concatenate([rows(mixer.table)[None], heads(mixer.key)], -1)
        y = naive("synthesizer_mixture")(hidden, table, value, **options)
    return jnp.einsum("tnh,nhd->td", y[0], mixer.out.kernel[...])


def lsh(mixer, x):
    def project(layer):
        return jnp.einsum("td,dnh->tnh", x, layer.kernel[...])[None]

    query_key = project(mixer.query_key)
    if mixer.rotary is not None:
        query_key = turned(query_key, mixer.rotary.theta)
    y = naive("lsh")(
        query_key,
        project(mixer.value),
        num_rounds=mixer.rotations.shape[1],
        num_buckets=mixer.factors or 1,
        chunk_length=mixer.chunk_length,
        rotations=mixer.rotations[...],
        is_causal=mixer.is_causal,
    )
    return jnp.einsum("tnh,nhd->td", y[0], mixer.out.kernel[...])


def indexed(mixer, x):
    def turn(x):
        return x if mixer.rotary is None else turned(x, mixer.rotary.theta)

    def project(layer):
        return jnp.einsum("td,dnh->tnh", x, layer.kernel[...])[None]

    key = x @ mixer.index_key.kernel[...]
    centred = key - key.mean(-1, keepdims=True)
    key = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    key = key * mixer.index_norm.scale[...] + mixer.index_norm.bias[...]
    index_query = (x @ mixer.index_query.kernel[...]).reshape(len(x), -1, key.shape[-1])
    y = naive("indexed")(
        turn(project(mixer.query)),
        turn(project(mixer.key)),
        project(mixer.value),
        index_query=turn(index_query[None]),
        index_key=turn(key[None, :, None])[:, :, 0],
        index_weights=(x @ mixer.index_weights.kernel[...])[None],
        top_k=mixer.top_k,
    )
    return jnp.einsum("tnh,nhd->td", y[0], mixer.out.kernel[...])


def turned(x, theta):
    """The rotary embedding of positions t, by complex numbers.

    Features m and m + H / 2 of `(B, T, N, H)` are a complex number, times e^(i t theta^(-2m/H)).
    """
    _, time, _, size = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    first, second = jnp.split(x.astype(wide), 2, -1)
    angle = jnp.outer(jnp.arange(time), theta ** (-jnp.arange(0, size, 2, wide) / size))
    z = (first + 1j * second) * jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([z.real, z.imag], -1).astype(x.dtype)
