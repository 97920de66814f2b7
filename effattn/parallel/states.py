"""Recurrences over a sequence that devices hold in parts, by the states between the parts."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from effattn.cores import passed_states

_LENGTHS = "query_seq_lengths", "key_value_seq_lengths"


def pass_states(function: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns a recurrence for a sequence whose tokens the devices of a mesh axis hold in parts.

    Call the result inside `jax.shard_map`. Its arrays of tokens are those of this device, where
    device n has the n-th part; lengths count all tokens. Each device sends one state and one
    transition to every other device, whatever the length, in at least float32. It runs the
    recurrence twice: once for the state that its own tokens add, and once from the state before
    them. A transition is one number for each head, or one for each feature; in the delta form it is
    a matrix F x F for each head, as large as a state, and the recurrence runs once more for it.

    The returned state is equal on all devices, but its type varies over the mesh axis: return
    `state[None]` with that axis in `out_specs`, one copy a device. In a loss that devices sum, only
    one device may count it.

    Args:
      function: `linear_attention` with `is_causal=True`, `retention`, `gated_linear_attention`,
        `state_space_duality`, `delta_rule_attention`, `rwkv6_attention` or `rwkv7_attention` of
        effattn, or `functools.partial` of one. An `initial_state` is that before the whole
        sequence, equal on all devices; the returned state is that after it. `segment_ids` are those
        of this device's tokens; documents may cross devices.
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function with the arguments and results of `function`.

    Raises:
      ValueError: on call, the function is none of these.
    """

    def run(query, *arrays, **options):
        tokens = query.shape[-3]
        first = lax.axis_index(axis_name) * tokens
        for name in _LENGTHS:
            if options.get(name) is not None:
                here = jnp.clip(jnp.asarray(options[name]) - first, 0, tokens)
                options[name] = here
        with passed_states.along(axis_name) as passing:
            found = function(query, *arrays, **options)
            if not passing.calls:
                passed_states.refuse(getattr(function, "__name__", "another function"))
        return found

    return run
