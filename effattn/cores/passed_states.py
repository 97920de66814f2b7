"""Recurrences over a sequence that devices hold in parts: states pass from part to part.

A part of the sequence maps the state S before it to A S + B. Every device computes A and B of its
part; all devices get all of these pairs, and each chains those of the parts before its own:

    S_(n+1) = A_n S_n + B_n

B is the state after the part for a zero state before it. Without the delta form, A is the decay of
the part, one number for each head or feature; in the delta form A is (F, F), the state after the
part for the identity before it, with values of zero.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.cores import sequence_parts
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, masked_terms

Core = Callable[..., tuple[jax.Array, jax.Array]]


def earlier_document(segment_ids: jax.Array, key_mask: jax.Array | None) -> jax.Array | None:
    """Id of the last document of earlier parts, `(*B)`, 0 if there is none; None outside `along`.

    Args:
      segment_ids: int `(*B, T)`, the ids of this part; 0 is padding.
      key_mask: bool `(*B, T)`, False for padding; None if only the ids say so.
    """
    parts = sequence_parts.current()
    if parts is None:
        return None
    ids = segment_ids if key_mask is None else jnp.where(key_mask, segment_ids, 0)
    place = jnp.max(jnp.where(ids != 0, jnp.arange(ids.shape[-1]), 0), -1, keepdims=True)
    last = jnp.take_along_axis(ids, place, -1)[..., 0]
    every = lax.all_gather(last, parts.axis_name)
    found = jnp.zeros_like(last)
    for part in range(len(every)):
        found = jnp.where((part < parts.index) & (every[part] != 0), every[part], found)
    return found


def chained(
    parts: sequence_parts.Parts, pairs: Any, state: Any, after: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """The state before this device's part of the sequence, and that after the whole sequence.

    Args:
      parts: the sequence in parts.
      pairs: pytree with the transition of this part and the state that it adds.
      state: the state before the whole sequence.
      after: `(state before a part, its pairs) -> state after it`.
    """
    pairs, state = mesh_axes.vary_alike((pairs, state))
    every = lax.all_gather(pairs, parts.axis_name)
    last, states = lax.scan(lambda state, pairs: (after(state, pairs), state), state, every)
    own = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, parts.index, 0, keepdims=False), states
    )
    return own, last


def in_turns(
    name: str,
    run: Callable[[Any, Any], tuple[Any, Any]],
    inputs: Any,
    state: Any,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """A recurrence whose next state is no linear function of its state: each device waits.

    Device n runs when device n - 1 has sent the state after its part; meanwhile the others wait.
    The time is that of one device, the memory that of a part: the backward pass computes the part
    again, from the states between the parts.

    Args:
      name: name of the mechanism, a key of `sequence_parts.SUPPORTED`.
      run: `(inputs, state before this part) -> (output, state after it)`.
      inputs: pytree of all arrays that `run` reads, with its parameters.
      state: pytree, the state before the whole sequence.
      reverse: whether the sequence is read from its end, so that the last device comes first.

    Returns:
      The output of this part, and None; outside of `sequence_parts.along` the results of `run`.
    """
    parts = sequence_parts.parts_for(name, "pass_states")
    # No collective may depend on the turn, such as a sum of gradients of shared parameters.
    inputs, state = mesh_axes.vary_alike((inputs, state))
    if parts is None:
        return run(inputs, state)
    devices, step = parts.devices, -1 if reverse else 1
    pairs = [(n, n + step) for n in range(devices) if 0 <= n + step < devices]
    turn = devices - 1 - parts.index if reverse else parts.index
    nothing = jax.tree.map(
        lambda y: mesh_axes.vary_like(jax.tree.leaves(state)[0], jnp.zeros(y.shape, y.dtype)),
        jax.eval_shape(run, inputs, state)[0],
    )

    @jax.checkpoint
    def own(number, inputs, state):
        return lax.cond(number == turn, run, lambda _, state: (nothing, state), inputs, state)

    def after(carry, number):
        output, state = carry
        more, state = own(number, inputs, state)
        state = jax.tree.map(lambda s: lax.ppermute(s, parts.axis_name, pairs), state)
        # A sum needs no earlier output in the backward pass.
        return (jax.tree.map(jnp.add, output, more), state), None

    (output, _), _ = lax.scan(after, (nothing, state), jnp.arange(devices))
    return output, None


def before(
    name: str,
    core: Callable[[Config], Core],
    config: Config,
    x: Inputs,
    total_decay: Callable[[Inputs], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The state before this device's part of the sequence, and that after the whole sequence.

    Args:
      name: name of the function, for the message.
      core: the recurrence of a configuration, `(*inputs) -> (output, state)`.
      config: the configuration.
      x: the inputs; the state is that before the whole sequence.
      total_decay: the product of the decays of all tokens, which broadcasts to the state; None if
        it follows from the decays in the terms.

    Returns:
      Two states; outside of `sequence_parts.along` the given state, and None.
    """
    parts = sequence_parts.parts_for(name, "pass_states")
    if parts is None:
        return x.state, None
    none = mesh_axes.vary_like(jax.tree.leaves(x.queries)[0], jnp.zeros_like(x.state))
    _, added = core(config)(*x._replace(state=none))
    if total_decay is None:
        kept, apply = _transition(core, config, x, none)
    else:
        kept, apply = _reset(total_decay(x), x.tokens), jnp.multiply
    return chained(parts, (kept, added), x.state, lambda s, pair: apply(pair[0], s) + pair[1])


def _transition(core, config, x, none):
    """A, and the function of A and S that gives A S."""
    terms = masked_terms(config, x.parameters, x.queries, x.keys, x.tokens, x.state.dtype)
    if terms.recalled is not None:
        features = x.state.shape[-2]
        identity = jnp.broadcast_to(
            jnp.eye(features, dtype=none.dtype), (*none.shape[:-1], features)
        )
        plain = config._replace(terms=_Emptied(config.terms), normalized=False)
        start = mesh_axes.vary_like(none, identity)
        # States are float32; the default precision of products is lower on GPUs and TPUs.
        product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        return core(plain)(*x._replace(state=start))[1], product
    axis = x.state.ndim - 3
    total = jnp.ones_like(none[..., :1, :1])
    if terms.log_decay is not None:
        total = jnp.exp(terms.log_decay.sum(axis))
        total = total[..., None] if total.ndim == axis + 2 else total[..., None, None]
    if terms.value_log_decay is not None:
        total = jnp.exp(terms.value_log_decay.sum(axis))[..., None, :]
    return mesh_axes.vary_like(none, _reset(total, x.tokens)), jnp.multiply


def _reset(total, tokens):
    """A document that starts here knows no earlier state."""
    if tokens.starts is None:
        return total
    return jnp.where(tokens.starts.any(-1)[..., None, None, None], 0, total)


@dataclasses.dataclass(frozen=True)
class _Emptied:
    """Terms with values of zero, of as many entries as there are features."""

    terms: Callable[[Any, Any, Any], Terms]

    def __call__(self, *arguments: Any) -> Terms:
        terms = self.terms(*arguments)
        shape = (*terms.value.shape[:-1], terms.key.shape[-1])
        return terms._replace(value=jnp.zeros_like(terms.value, shape=shape))
