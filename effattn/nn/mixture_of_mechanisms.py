"""Mixer with a gate per token over several mechanisms."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes, segments
from effattn.arrays.gathers import inverse_of
from effattn.arrays.segments import positions_from
from effattn.cores import sequence_parts
from effattn.decode.state import new_lengths, row_lengths
from effattn.nn import initializers
from effattn.nn.build import Mechanism, mechanism, named
from effattn.nn.hybrid import HybridState, SeveralMixers
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.self_attention import SelfAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixtureState(HybridState):
    """Decode state of a `MixtureOfMechanisms` with a capacity.

    Attributes:
      taken: `(B, M - 1)` int32, places taken so far in each mechanism but the first.
    """

    taken: jax.Array

    @property
    def parts(self) -> tuple[Any, ...]:
        """The states of the mixers, and `taken`, which cannot forget."""
        return *self.groups, self.taken


class MixtureOfMechanisms(SeveralMixers):
    """Mixture of mechanisms with a gate per token (Jacobs et al. 1991, "Adaptive Mixtures").

        y_t = sum_m g_tm mixer_m(x)_t,   g_t = softmax(x_t W_g + b_g)

    With `gate="top1"` the largest entry of g_t becomes 1 and the other entries 0; the gradient is
    that of the softmax (straight-through estimator, Bengio et al. 2013). Without `capacity`, every
    mechanism computes outputs for all tokens, and the gate selects or mixes the outputs: time,
    memory and decode state are the sums over the mechanisms. Add `penalty` to the loss to
    discourage costly mechanisms:

        penalty = mean_t sum_m g_tm cost_m

    With `capacity` c, every mechanism but the first computes queries and outputs of at most c T
    tokens, which read the keys and values of all T tokens. Tokens take their places in the order
    of time: token t of a document, counted from 1, gets a place in the mechanism that it chose if
    fewer than floor(c t) tokens have one; else it takes the first mechanism. The choice is causal
    and the same for every split of a sequence. Mixture-of-Depths (Raposo et al. 2024) takes the
    best tokens of the whole sequence instead, and the capacity of Switch Transformers (Fedus et al.
    2021) follows the length. Two things are lost: tokens t < 1 / c take the first mechanism, and
    early choices may leave no place for a later, better choice.

    The time with `capacity` is that of the first mechanism, of all keys and values, and of c T^2
    pairs for each other mechanism, also if causal: c below 1/2 saves time. Places that no token
    took compute the outputs of the tokens with the largest gates, for the gradient of the gate
    alone. The gates of tokens without a computed output have no gradient but that of `penalty`.
    Decoding computes all mechanisms for each new token.

    Args:
      num_heads: N, number of heads of every mechanism.
      mechanisms: two or more registered names, callables, or mappings of a `"name"` and options;
        see `effattn.nn.build`.
      costs: finite cost of each mechanism, 0 or more; default 0, 1, ... in the order of
        `mechanisms`.
      gate: "soft" or "top1".
      capacity: c, between 0 and 1; None without a limit. It needs `gate="top1"`, and exact
        attention (`"softmax"`) as every mechanism but the first.
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      **options: those of `effattn.nn.options.Projected`, and model options for all mixers, such as
        `rotary` and `num_kv_heads`.

    Raises:
      ValueError: an unknown gate or mechanism, invalid costs or capacity, or an option that a
        mechanism does not support.
    """

    _mechanism = "mixture_of_mechanisms"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mechanisms: Sequence[Mechanism] = ("sliding_window", "softmax"),
        costs: Sequence[float] | None = None,
        gate: str = "soft",
        capacity: float | None = None,
        max_length: int | None = None,
        **options: Annotated[Any, Projected],
    ):
        super().__init__(in_features, **options)
        if gate not in ("soft", "top1"):
            raise ValueError(f'gate must be "soft" or "top1", got {gate!r}')
        is_several = isinstance(mechanisms, Sequence) and not isinstance(mechanisms, str)
        several = mechanisms if is_several else ()
        if len(several) < 2:
            raise ValueError(
                "mechanisms must be two or more registered names, callables, or mappings with a "
                f'"name", got {mechanisms!r}'
            )
        given = [named("each item of mechanisms", one) for one in several]
        costs = range(len(given)) if costs is None else costs
        costs = tuple(costs) if np.iterable(costs) else (costs,)
        needs = f"{len(given)} finite numbers, 0 or more, one for each mechanism"
        values = [checks.real("costs", cost, needs) for cost in costs]
        if len(costs) != len(given) or not all(0 <= cost < math.inf for cost in values):
            raise ValueError(f"costs must be {needs}, got {costs}")
        self.gate, self.costs = gate, costs
        entries = [mechanism(name) for name, _ in given]
        self.names = tuple(entry.name for entry in entries)
        common = {"is_causal": self.is_causal, "max_length": max_length, **options}
        self.mixers = nnx.List(
            entry.build(in_features, num_heads, **{**entry.options_of_model(common), **own})
            for entry, (_, own) in zip(entries, given, strict=True)
        )
        if capacity is not None:
            self._check_capacity(capacity)
        self.capacity, self._of_known_length = capacity, capacity is not None
        make = Layers(**{**options, "kernel_init": initializers.kernel_init})
        self.choose = make.linear(in_features, len(entries), use_bias=True)

    @property
    def calls_each_alone(self) -> bool:
        """False with `capacity`, as the tokens before a token may have taken all places."""
        return self.capacity is None

    def gates(self, x: jax.Array) -> jax.Array:
        """Gate values g of each token and mechanism, without regard to the capacity.

        Args:
          x: `(B, T, D)`.

        Returns:
          `(B, T, M)`, rows that sum to 1, in at least float32.
        """
        soft = self._shares(x)
        if self.gate == "soft":
            return soft
        hard = jax.nn.one_hot(soft.argmax(-1), len(self.names), dtype=soft.dtype)
        return _straight_through(hard, soft)

    def token_costs(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Cost of each token, `(B, T)`, 0 in the padding; arguments as in `__call__`.

        With `capacity`, it counts the mechanisms that the tokens take.
        """
        if lengths is not None:
            lengths = row_lengths(lengths, *x.shape[:2])
        valid = _valid(x, lengths, segment_ids)
        x = jnp.where(valid[..., None], x, 0)
        if self.capacity is None:
            gates = self.gates(x)
        else:
            gates, _ = self._places(self._shares(x), valid, _document_positions(x, segment_ids))
        cost = gates @ jnp.asarray(self.costs, gates.dtype)
        return jnp.where(valid, cost, 0)

    def penalty(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Mean of `token_costs` over valid tokens, a scalar `()`."""
        costs = self.token_costs(x, lengths=lengths, segment_ids=segment_ids)
        return costs.sum() / jnp.maximum(_valid(x, lengths, segment_ids).sum(), 1)

    def _initial(self, batch, max_length, dtype):
        state = super()._initial(batch, max_length, dtype)
        if self.capacity is None:
            return state
        taken = jnp.zeros((batch, len(self.names) - 1), jnp.int32)
        return MixtureState(state.groups, state.length, taken)

    def _check_state(self, state, batch):
        super()._check_state(state, batch)
        if isinstance(state, MixtureState) != (self.capacity is not None):
            raise ValueError(
                f"state must be one that init_state made for capacity={self.capacity}; it is the "
                "state of another layer"
            )

    def _check_capacity(self, capacity):
        needs = "a number between 0 and 1, or None"
        if not 0 < np.float32(checks.real("capacity", capacity, needs)) < 1:
            raise ValueError(f"capacity must be {needs}, got {capacity!r}")
        if self.gate != "top1":
            raise ValueError(f'capacity={capacity} needs gate="top1", got gate={self.gate!r}')
        for name, mixer in zip(self.names[1:], self.mixers[1:], strict=True):
            if not (isinstance(mixer, SelfAttention) and mixer.attends_from_any_tokens()):
                raise ValueError(
                    f'capacity={capacity} needs exact attention ("softmax", without bias and '
                    "mask) as every mechanism but the first, which takes the other tokens, got "
                    f"{name!r}"
                )

    def _shares(self, x):
        """Softmax over the mechanisms, `(B, T, M)`."""
        logits = self.choose(x)
        return jax.nn.softmax(dtypes.widen(logits), -1)

    def _mix_all(self, x, lengths, segment_ids):
        given = {"lengths": lengths, "segment_ids": segment_ids}
        if self.capacity is None:
            return self._combined(x, self._outputs(x, given))
        # Places are given in the order of time, so that each device needs the gates of all tokens.
        valid, shares, at = map(
            _of_all_tokens,
            (_valid(x, lengths, segment_ids), self._shares(x), _document_positions(x, segment_ids)),
        )
        gates, _ = self._places(shares, valid, at)
        first, *others = self.mixers
        y = first(x, **given)
        most = int(_budget(self.capacity, np.int32(valid.shape[1])))
        if not most:
            return y
        gates, of_first, chosen = gates.astype(y.dtype), jnp.ones((), y.dtype), jnp.zeros_like(y)
        for m, mixer in enumerate(others, 1):
            # Tokens with a place come first, then those with the largest gates; padding is last.
            rank = jnp.where(valid, jax.lax.stop_gradient(gates[..., m] + shares[..., m]), -1)
            order = jnp.argsort(-rank, axis=-1, stable=True).astype(jnp.int32)
            computed = mixer.outputs_at(x, order[:, :most], **given)
            gate = jnp.where(valid & (inverse_of(order) < most), gates[..., m], 0)[..., None]
            gate = _of_own_tokens(gate, x.shape[1])
            of_first = of_first - gate
            chosen = chosen + gate * computed
        return of_first * y + chosen

    def _extend(self, x, state, lengths, global_mask=None):
        if self.capacity is None:
            return super()._extend(x, state, lengths, global_mask)
        pairs = zip(self.mixers, state.groups, strict=True)
        outputs, groups = zip(*(m.extend(x, s, lengths=lengths) for m, s in pairs), strict=True)
        at = positions_from(state.length, x.shape[1])
        gates, taken = self._places(
            self._shares(x), _valid(x, lengths, None), at, state.taken[:, None]
        )
        length = state.length + new_lengths(lengths, *x.shape[:2])
        return _weighted(gates, outputs), MixtureState(groups, length, taken)

    def _combined(self, x, outputs):
        return _weighted(self.gates(x), outputs)

    def _places(self, shares, valid, at, taken=0):
        """Gates of tokens that take places in the order of time.

        Args:
          shares: `(B, T, M)`, softmax of the gate.
          valid: bool `(B, T)`.
          at: `(B, T)`, positions in the documents.
          taken: `(B, 1, M - 1)`, places taken before; default 0.

        Returns:
          `(gates (B, T, M), taken (B, M - 1))`: 1 for the mechanism that a token takes, and 0; with
          the gradient of the shares; and the places taken after these tokens.
        """
        wish = jax.nn.one_hot(shares.argmax(-1) - 1, len(self.names) - 1, dtype=jnp.int32)
        wish = jnp.where(valid[..., None], wish, 0)
        budget = _budget(self.capacity, at + 1)[..., None]
        # The count of places is n_t = min(n_(t-1) + wish_t, budget_t). As the capacity is below 1,
        # the budget of the first token of a document is 0, so that counts start at 0.
        taken = jnp.zeros_like(wish[:, :1]) + taken
        total = taken + jnp.cumsum(wish, 1)
        after = total + jnp.minimum(0, jax.lax.cummin(budget - total, axis=1))
        before = jnp.concatenate([taken, after[:, :-1]], 1)
        placed = jnp.where(before < budget, wish, 0).astype(shares.dtype)
        gates = jnp.concatenate([1 - placed.sum(-1, keepdims=True), placed], -1)
        return _straight_through(gates, shares), after[:, -1]


def _budget(capacity, tokens):
    """Places among the first tokens of a document, int32; equal in NumPy and JAX."""
    return (tokens.astype(np.float32) * np.float32(capacity)).astype(np.int32)


def _straight_through(hard, soft):
    # The parentheses make the value exactly 0 or 1.
    return hard + (soft - jax.lax.stop_gradient(soft))


def _weighted(gates, outputs):
    gates = gates.astype(outputs[0].dtype)
    return sum(gates[..., m, None] * y for m, y in enumerate(outputs))


def _valid(x, lengths, segment_ids):
    valid = segments.valid(lengths, segment_ids, x.shape[1])
    return jnp.ones(x.shape[:2], bool) if valid is None else valid


def _document_positions(x, segment_ids):
    at = sequence_parts.positions(x.shape[1], segment_ids).astype(jnp.int32)
    return jnp.broadcast_to(at, x.shape[:2])


def _of_all_tokens(x):
    """x `(B, T, ...)` of all tokens, from the part of this device."""
    parts = sequence_parts.current()
    return x if parts is None else parts.gather(x, 1)


def _of_own_tokens(x, size):
    parts = sequence_parts.current()
    return x if parts is None else parts.own(x, size, 1)
