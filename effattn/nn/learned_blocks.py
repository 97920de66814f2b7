"""Mixer with learned blocks, and its selector."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes, mesh_axes
from effattn.cores import sequence_parts
from effattn.functional.learned_blocks import sampled_block_attention
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class LearnedBlockSelfAttention(SelfAttention):
    """Mixer that attends to blocks of a learned selector (Gao et al. 2024, "SeerAttention").

        q, k, v = x Wq, x Wk, x Wv;   p, r = x Wp, x Wr
        y = learned_block_attention(q, k, v, selection_query=p, selection_key=r) Wo

    Each key head has its own p and r. The selector is trained with the model, by the
    straight-through estimator of `effattn.learned_block_attention`, or by policy gradient: `sample`
    draws blocks and returns the log-probabilities for `policy_loss`.

    Args:
      selection_features: Hs, features of p and r; default H.
      **options: as in `SelfAttention`, and options of `effattn.learned_block_attention`; the
        defaults are `block_size` 64 and `top_k` 3.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        selection_features: int | None = None,
        **options: SelfAttentionOptions,
    ):
        names = "selection_query", "selection_key"
        refuse(type(self), options, names, "it projects both from the tokens")
        super().__init__(in_features, num_heads, "learned_blocks", **options)
        size = self.head_dim if selection_features is None else selection_features
        size = checks.at_least("selection_features", size, 1, "features, or None")
        make = Layers(**options)
        self.selection_query = make.heads(in_features, (self.num_kv_heads, size))
        self.selection_key = make.heads(in_features, (self.num_kv_heads, size))

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "selection_query": self.selection_query(x),
            "selection_key": self.selection_key(x),
        }

    @mesh_axes.on_mesh_of_input
    def sample(
        self,
        x: jax.Array,
        rng: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Mixes whole sequences, with blocks drawn from the policy of the selector.

        Args:
          x: `(B, T, D)`.
          rng: a `jax.random` key.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: as in a call.

        Returns:
          `(B, T, D)`, without a gradient for the selector, and the log-probability of the blocks of
          each token and key head, `(B, T, K)`, 0 for padding.
        """
        sequence_parts.check_mixer(self)
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        heads = self._heads(x, positions, lengths=lengths, segment_ids=segment_ids)
        given: dict[str, Any] = {**keywords, **self._per_token(x), "rng": rng}
        given.pop("implementation", None)  # a naive form exists for the largest scores alone
        out, logs = sampled_block_attention(*heads, **given)
        return self.out(out), logs


@checks.checked
def policy_loss(
    log_probs: jax.Array, rewards: jax.Array, *, baseline: jax.Array | None = None
) -> jax.Array:
    """The loss of REINFORCE (Williams 1992), whose gradient is that of minus the expected reward.

        - sum over tokens t and heads h of mean over rows of (reward - baseline) log p_th

    Rewards and baselines are constants, without gradients. The default baseline of a row is the
    mean of the rewards of the other rows, which does not depend on its choices and adds no bias.

    Args:
      log_probs: `(B, T, K)`, from `LearnedBlockSelfAttention.sample`.
      rewards: `(B,)`, or `(B, T)` for a reward of the choice of each token.
      baseline: in the shape of `rewards`; default as above, and 0 for a single row.

    Returns:
      `()`, at least float32.
    """
    batch, time, _ = log_probs.shape if log_probs.ndim == 3 else (-1, -1, -1)
    if batch < 1 or rewards.shape not in ((batch,), (batch, time)):
        raise ValueError(
            "policy_loss needs log_probs (B, T, K) and rewards (B,) or (B, T) of at least one row, "
            f"got {log_probs.shape} and {rewards.shape}"
        )
    rewards = rewards.astype(dtypes.wide(log_probs.dtype))
    if baseline is None:
        baseline = (rewards.sum(0, keepdims=True) - rewards) / max(batch - 1, 1)
    elif baseline.shape != rewards.shape:
        raise ValueError(
            f"baseline must have the shape of rewards, {rewards.shape}, got {baseline.shape}"
        )
    gain = jax.lax.stop_gradient(rewards - baseline.astype(rewards.dtype))
    logs = log_probs.astype(rewards.dtype).sum(-1)
    return -jnp.mean((gain.reshape(batch, -1) * logs).sum(-1))
