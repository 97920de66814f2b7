"""Recurrences over a sequence that devices hold in parts, by the states between the parts."""

from collections.abc import Callable
from typing import Any

from effattn.parallel.parts import over_parts


def pass_states(function: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns a recurrence for a sequence whose tokens the devices of a mesh axis hold in parts.

    Call the result inside `jax.shard_map`. Its arrays of tokens are those of this device, where
    device n has the n-th part; lengths count all tokens. Each device sends one state and one
    transition to every other device, whatever the length, in at least float32. It runs the
    recurrence twice: once for the state that its own tokens add, and once from the state before
    them. A transition is one number for each head, one for each feature of a key, or, for Mamba and
    state spaces, one for each entry of the state; in the delta form it is a matrix F x F for each
    head, and the recurrence runs once more for it.

    Where the next state is no linear function of the state (LSTM, sLSTM, GRU, recurrent memory),
    each device waits for the state of the device before. This divides the memory and not the time,
    and the backward pass runs the recurrence a second time.

    The returned state is equal on all devices, but its type varies over the mesh axis: return
    `state[None]` with that axis in `out_specs`, one copy a device. In a loss that devices sum, only
    one device may count it.

    Args:
      function: a causal recurrence of effattn: `linear_attention`, `attention_free` and `s5_scan`
        with `is_causal=True`, `retention`, `gated_linear_attention`, `state_space_duality`,
        `selective_scan`, `trapezoidal_scan`, `delta_rule_attention`, `mesa_attention`,
        `mlstm_attention`, `rwkv4_mixing`, `rg_lru`, `gated_slot_attention`, `luna_attention`,
        `rwkv6_attention`, `rwkv7_attention`, `s4_convolution` or `h3_mixing`; `functools.partial`
        of one; or a mixer of one from `effattn.nn`. An `initial_state` is that before the whole
        sequence, equal on all devices; the returned state is that after it. `segment_ids` are those
        of this device's tokens; documents may cross devices. Mixers with short convolutions or a
        token shift, and `nn.ShortConvolution`, `nn.DilatedConvolution` and the channel mixings of
        RWKV themselves, get the last tokens of the device before: as many as the convolution
        reaches back, or one.
        `nn.LSTM`, `nn.SLSTM` and `nn.GRU` may also read both directions. Each device must have
        whole segments of `nn.RecurrentMemoryAttention`, `nn.TransformerXLAttention` and
        `nn.CompressiveAttention`, and at least the tokens that a segment of the last two reads
        before it, also in slots. `nn.Mega` needs whole chunks, or, with `segment_ids`, at least the
        c - 1 tokens before a token.
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function with the arguments and results of `function`.

    Raises:
      ValueError: on call, the function is none of these, or a device has fewer tokens than a
        convolution reads.
    """
    return over_parts("pass_states", function, axis_name)
