"""Decode caches: bytes a token, and decode steps a second after a prefix."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.costs.layers import EXACT, Layer, Workload, bytes_of

PIECE = 4096  # tokens of a prefix that one call reads


def capacity(prefixes: Sequence[int]) -> int:
    """Returns the number of tokens that all caches have room for, whatever their prefix."""
    return 2 * max(prefixes)


def key_heads(heads: int) -> dict[str, int]:
    """Returns numbers of key heads of softmax attention by the name of the cache, all different."""
    found = {"multi-head": heads}
    proper = [n for n in range(1, heads) if heads % n == 0]
    if proper and proper[-1] > 1:
        found["grouped-query"] = proper[-1]
    if proper:
        found["multi-query"] = 1
    return found


def cache_layers(mechanism: str, length: int, workload: Workload) -> dict[str, Layer]:
    """Returns the layers of a mechanism by the name of their cache; empty without decoding."""
    layer = Layer(mechanism, "causal", length, workload)
    if layer.state_bytes() is None:
        return {}
    if mechanism != EXACT:
        return {mechanism: layer}
    return {
        f"{mechanism}, {name}": dataclasses.replace(layer, options=(("num_kv_heads", heads),))
        for name, heads in key_heads(workload.heads).items()
    }


def bytes_by_token(layer: Layer) -> tuple[int, float]:
    """Returns the bytes of a state that do not grow, and the bytes that each token adds.

    Options that follow the length are those of `layer.length`.
    """
    mixer = layer.build()

    def state_bytes(length: int) -> int:
        dtype = layer.workload.precision
        return bytes_of(jax.eval_shape(lambda: mixer.init_state(1, length, dtype)))

    half, whole = state_bytes(layer.length // 2), state_bytes(layer.length)
    each = (whole - half) / (layer.length // 2)
    return round(whole - each * layer.length), each


def step_seconds(layer: Layer, prefixes: Sequence[int], rounds: int) -> dict[int, float]:
    """Returns the median seconds of a decode step after each prefix, measured in turns.

    Args:
      layer: causal layer with room for the longest prefix and `rounds` + 2 further tokens.
      prefixes: numbers of tokens.
      rounds: steps after each prefix.
    """
    mixer, dtype = layer.build(), jnp.dtype(layer.workload.precision)

    def extend(mixer, x, state, lengths=None):
        return mixer.extend(x, state, lengths=lengths)

    prefill = jax.jit(lambda *args: extend(*args)[1], donate_argnums=2)
    step = jax.jit(extend, donate_argnums=2)
    token, piece = (
        jax.random.normal(jax.random.key(seed), (1, tokens, layer.workload.features), dtype)
        for seed, tokens in enumerate((1, min(PIECE, max(prefixes))))
    )
    states: dict[int, Any] = {}
    for prefix in prefixes:
        state = mixer.init_state(1, layer.length, dtype)
        for start in range(0, prefix, piece.shape[1]):
            lengths = jnp.array([min(piece.shape[1], prefix - start)])
            state = prefill(mixer, piece, state, lengths)
        states[prefix] = state
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    for n in range(rounds + 2):
        for prefix in np.roll(prefixes, n).tolist():
            begin = time.perf_counter()
            y, states[prefix] = step(mixer, token, states[prefix])
            jax.block_until_ready((y, states[prefix]))
            if n >= 2:  # the first steps are slower
                times[prefix].append(time.perf_counter() - begin)
    return {prefix: statistics.median(each) for prefix, each in times.items()}
