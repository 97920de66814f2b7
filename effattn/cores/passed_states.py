"""Recurrences over a sequence that devices hold in parts: states pass from part to part.

A part of the sequence maps the state S before it to A S + B. Every device computes A and B of its
part; all devices get all of these pairs, and each chains those of the parts before its own:

    S_(n+1) = A_n S_n + B_n

B is the state after the part for a zero state before it. Without the delta form, A is the decay of
the part, one number for each head or feature; in the delta form A is (F, F), the state after the
part for the identity before it, with values of zero.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, masked_terms

# Functions whose tokens know of earlier ones by the state alone.
TAKEN = frozenset(
    {
        "linear_attention",
        "retention",
        "gated_linear_attention",
        "state_space_duality",
        "delta_rule_attention",
        "rwkv6_attention",
        "rwkv7_attention",
    }
)

Core = Callable[..., tuple[jax.Array, jax.Array]]

_passing: Any = jax.make_user_context(None)


@dataclasses.dataclass(eq=False)
class Passing:
    """States pass along a mesh axis.

    Attributes:
      axis_name: the mesh axis.
      calls: number of recurrences that passed states.
    """

    axis_name: str
    calls: int = 0


@contextlib.contextmanager
def along(axis_name: str) -> Iterator[Passing]:
    """Within, recurrences pass states along a mesh axis, and other mechanisms are refused."""
    passing = Passing(axis_name)
    with _passing(passing):
        yield passing


def refuse(name: str) -> None:
    """Raises `ValueError` if states pass along a mesh axis: `name` needs more than states."""
    if _passing.value is not None:
        raise ValueError(
            f"pass_states takes {', '.join(sorted(TAKEN))}, got {name}; exchange_heads takes any "
            "function over heads"
        )


def earlier_document(segment_ids: jax.Array, key_mask: jax.Array | None) -> jax.Array | None:
    """Id of the last document of earlier parts, `(*B)`, 0 if there is none; None outside `along`.

    Args:
      segment_ids: int `(*B, T)`, the ids of this part; 0 is padding.
      key_mask: bool `(*B, T)`, False for padding; None if only the ids say so.
    """
    passing = _passing.value
    if passing is None:
        return None
    ids = segment_ids if key_mask is None else jnp.where(key_mask, segment_ids, 0)
    place = jnp.max(jnp.where(ids != 0, jnp.arange(ids.shape[-1]), 0), -1, keepdims=True)
    last = jnp.take_along_axis(ids, place, -1)[..., 0]
    every = lax.all_gather(last, passing.axis_name)
    found = jnp.zeros_like(last)
    for part in range(len(every)):
        is_earlier = part < lax.axis_index(passing.axis_name)
        found = jnp.where(is_earlier & (every[part] != 0), every[part], found)
    return found


def before(
    name: str, core: Callable[[Config], Core], config: Config, x: Inputs
) -> tuple[jax.Array, jax.Array | None]:
    """The state before this device's part of the sequence, and that after the whole sequence.

    Args:
      name: name of the function, for the message.
      core: the recurrence of a configuration, `(*inputs) -> (output, state)`.
      config: the configuration.
      x: the inputs; the state is that before the whole sequence.

    Returns:
      Two states; outside of `along` the given state, and None.
    """
    passing = _passing.value
    if passing is None:
        return x.state, None
    if name not in TAKEN:
        refuse(name)
    passing.calls += 1
    axis_name = passing.axis_name
    none = mesh_axes.vary_like(jax.tree.leaves(x.queries)[0], jnp.zeros_like(x.state))
    _, added = core(config)(*x._replace(state=none))
    kept, apply = _transition(core, config, x, none)
    every = lax.all_gather((kept, added), axis_name)
    start = mesh_axes.vary_like(added, x.state)

    def chain(state, part):
        kept, added = part
        return apply(kept, state) + added, state

    after, states = lax.scan(chain, start, every)
    return lax.dynamic_index_in_dim(states, lax.axis_index(axis_name), 0, keepdims=False), after


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
        return core(plain)(*x._replace(state=start))[1], jnp.matmul
    axis = x.state.ndim - 3
    total = jnp.ones_like(none[..., :1, :1])
    if terms.log_decay is not None:
        total = jnp.exp(terms.log_decay.sum(axis))
        total = total[..., None] if total.ndim == axis + 2 else total[..., None, None]
    if x.tokens.starts is not None:  # a document that starts here knows no earlier state
        starts = x.tokens.starts.any(-1)
        total = jnp.where(starts[..., None, None, None], 0, total)
    return mesh_axes.vary_like(none, total), jnp.multiply


@dataclasses.dataclass(frozen=True)
class _Emptied:
    """Terms with values of zero, of as many entries as there are features."""

    terms: Callable[[Any, Any, Any], Terms]

    def __call__(self, *arguments: Any) -> Terms:
        terms = self.terms(*arguments)
        shape = (*terms.value.shape[:-1], terms.key.shape[-1])
        return terms._replace(value=jnp.zeros_like(terms.value, shape=shape))
