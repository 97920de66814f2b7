"""Mixer that reads the tokens in both directions by two causal mixers."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from effattn.arrays.gathers import permute
from effattn.arrays.segments import within
from effattn.cores import sequence_parts
from effattn.nn.build import Mechanism, mechanism, named
from effattn.nn.mixer import Mixer
from effattn.nn.options import Projected


class Bidirectional(Mixer):
    """Two causal mixers, of which one reads the tokens from the last to the first.

        y = forward(x) + reverse(backward(reverse(x)))

    Each document is reversed within its own place, and padding stays at its end. Time and memory
    are those of both mixers. Such layers are known as bidirectional Mamba (Zhu et al. 2024, "Vision
    Mamba"; Schiff et al. 2024, "Caduceus") and bidirectional S4 (Goel et al. 2022, "It's Raw!").
    `LSTM` and `GRU` read both directions by themselves.

    Schuster and Paliwal 1997, "Bidirectional Recurrent Neural Networks".

    Args:
      num_heads: N, number of heads of each mixer.
      mixer: registered name, callable, or mapping of a `"name"` and options of the causal mixers;
        see `effattn.nn.build`.
      max_length: maximum number of tokens per row, for mixers with parameters per position.
      **options: those of `effattn.nn.options.Projected`, and model options for both mixers, such as
        `num_kv_heads`.

    Raises:
      ValueError: an unknown mixer, or an option that it does not support.
    """

    _mechanism = "bidirectional"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mixer: Mechanism = "mamba",
        max_length: int | None = None,
        is_causal: bool = False,
        **options: Annotated[Any, Projected],
    ):
        super().__init__(in_features, is_causal=is_causal, **options)
        name, own = named("mixer", mixer)
        entry = mechanism(name)
        common = {**options, "is_causal": True, "max_length": max_length}
        given = {**entry.options_of_model(common), **own}
        self.mixers = nnx.List([entry.build(in_features, num_heads, **given) for _ in range(2)])

    def _mix_all(self, x, lengths, segment_ids):
        forward, backward = self.mixers
        padding = {"lengths": lengths, "segment_ids": segment_ids}
        y = forward(x, **{name: array for name, array in padding.items() if array is not None})
        if segment_ids is None and sequence_parts.current() is None:
            order = None if lengths is None else _reversed_rows(jnp.asarray(lengths), x.shape[1])
            given = {} if lengths is None else {"lengths": lengths}
            return y + _turned(backward(_turned(x, order), **given), order)
        if lengths is not None or segment_ids is not None:
            ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
            if lengths is not None:
                ids = jnp.where(within(jnp.asarray(lengths), x.shape[1]), ids, 0)
            padding = {"segment_ids": _turned(jnp.asarray(ids))}
        else:
            padding = {}
        return y + _turned(backward(_turned(x), **padding))


def _turned(x: jax.Array, order: jax.Array | None = None) -> jax.Array:
    """x `(B, T, ...)` with its tokens in reverse, or in an order `(B, T)` that is its own inverse.

    Where devices hold parts of the tokens, the devices reverse their order, too.
    """
    if order is not None:
        return permute(x, order, order)
    parts, x = sequence_parts.current(), jnp.flip(x, 1)
    if parts is None:
        return x
    last = parts.devices - 1
    return lax.ppermute(x, parts.axis_name, [(n, last - n) for n in range(parts.devices)])


def _reversed_rows(lengths: jax.Array, time: int) -> jax.Array:
    """Order `(B, T)` that reverses the valid tokens of each row, and leaves its padding."""
    token = jnp.arange(time, dtype=jnp.int32)[None]
    length = lengths[:, None].astype(jnp.int32)
    return jnp.where(token < length, length - 1 - token, token)
