"""Synthesizer mixer: attention logits from single tokens or positions."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.cores import sequence_parts
from effattn.functional.softmax import dot_product_attention
from effattn.functional.synthesizer import synthesizer_attention
from effattn.functional.synthesizer_factorized import factorized_synthesizer_attention
from effattn.nn.cached import CachedMixer
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.parallel.heads import attend_in_parts

_KINDS = {
    "dense": "synthesizer",
    "factorized": "synthesizer_factorized",
    "random": "synthesizer_random",
    "factorized_random": "synthesizer_factorized_random",
    "mixture": "synthesizer_mixture",
}


class Synthesizer(CachedMixer):
    """Synthesizer (Tay et al. 2020, "Synthesizer: Rethinking Self-Attention", section 3).

    Each head computes

        y_t = softmax_s(logit_ts) (x_s W_v) W_o

    r_s is a learned vector for position s. The logits depend on `kind`:

        dense              h_t . r_s,   h_t = relu(x_t W_1 + b), of size A
        factorized         a_t[s // m] b_t[s % m],   a_t, b_t = linear layers of x_t, of sizes l
                           and m, with l m >= L
        random             R_ts, a learned L x L table per head
        factorized_random  p_t . r_s, with a learned vector p_t of size A for position t
        mixture            g (h_t . r_s) + (1 - g) q_t . k_s / sqrt(H), with a learned g in (0, 1):
                           dense and dot-product attention

    Memory is linear in the length, but O(T^1.5) for "factorized", and "random" has a table of L^2.
    The decode state caches all values (and keys for "mixture"); a step costs O(S (A + H)). Only the
    random kinds depend on the query position; the other kinds need position embeddings in x, which
    a `Transformer` adds.

    Args:
      max_length: L, number of positions with parameters; maximum number of tokens per row.
        Positions count from the start of each packed document.
      kind: one of the kinds above.
      head_dim: H, head dimension; default D / N.
      hidden_features: A, hidden size, for "dense", "factorized_random" and "mixture"; default H.
      trained: whether the parameters of the random kinds are trained or stay constant.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: an unknown kind, inconsistent sizes, or an option that the kind or the mechanism
        does not support; in calls, more tokens than `max_length`.
    """

    _of_known_length = True
    _limited = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        max_length: int,
        kind: str = "dense",
        head_dim: int | None = None,
        hidden_features: int | None = None,
        trained: bool = True,
        **options: Unpack[Projected],
    ):
        self._mechanism = _KINDS[checks.one_of("kind", kind, _KINDS)]
        super().__init__(in_features, **options)
        if hidden_features is not None and kind in ("factorized", "random"):
            raise ValueError(f"kind={kind!r} takes no hidden_features, got {hidden_features}")
        if not trained and kind not in ("random", "factorized_random"):
            raise ValueError(
                f"trained=False needs kind='random' or 'factorized_random', got kind={kind!r}"
            )
        self.kind, self.trained = kind, trained
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads = num_heads
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        hidden = self.head_dim if hidden_features is None else hidden_features
        hidden = checks.at_least("hidden_features", hidden, 1, "features")

        make = Layers(**options)

        def heads(size, use_bias=False):
            return make.heads(in_features, (num_heads, size), use_bias=use_bias)

        def table(*shape, scale):
            drawn = make.drawn(nnx.initializers.normal(scale), *shape)
            return drawn if trained else nnx.Variable(drawn[...])

        if kind in ("dense", "mixture"):
            self.hidden = heads(hidden, use_bias=True)
        if kind in ("dense", "mixture", "factorized_random"):
            self.table = table(max_length, num_heads, hidden, scale=hidden**-0.5)
        if kind == "factorized_random":
            self.rows = table(max_length, num_heads, hidden, scale=1.0)
        if kind == "random":
            self.table = table(num_heads, max_length, max_length, scale=1.0)
        if kind == "factorized":
            fine = int(np.ceil(np.sqrt(max_length)))
            self.fine, self.coarse = heads(fine), heads(-(-max_length // fine))
        if kind == "mixture":
            self.query, self.key = heads(self.head_dim), heads(self.head_dim)
            self.mixture = make.constant(jnp.zeros(num_heads))
        self.value = heads(self.head_dim)
        self.out = make.out((num_heads, self.head_dim), in_features)

    def _prepare(self, x, positions):
        tokens, own = {"value": self.value(x)}, {}
        if self.kind in ("dense", "mixture"):
            own["hidden"] = jax.nn.relu(self.hidden(x))
        if self.kind == "mixture":
            own["query"], tokens["key"] = self.query(x), self.key(x)
        if self.kind == "factorized":
            own["coarse"], own["fine"] = self.coarse(x), self.fine(x)
        return tokens, own

    def _mix_all(self, x, lengths, segment_ids):
        places = None
        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids)
            places = sequence_parts.positions(x.shape[1], segment_ids)
        elif sequence_parts.current() is not None and self.kind != "random":
            places = sequence_parts.positions(x.shape[1])
        options = {
            "query_seq_lengths": lengths,
            "key_value_seq_lengths": lengths,
            "segment_ids": segment_ids,
        }
        tokens, own = self._prepare(x, None)
        return self._attend(tokens, own, places, places, options)

    def _mix_at(self, tokens, own, positions):
        return self._attend(tokens, own, positions, None, {"query_offset": positions[:, 0]})

    def _attend(self, tokens, own, of_queries, of_keys, options):
        """Attention output for query and key positions `(B, T)`; None means 0, 1, 2, ..."""
        value, options = tokens["value"], {"is_causal": self.is_causal, **options}
        batch, keys = value.shape[:2]
        dtype = value.dtype

        def rows(table, places, axis=0):
            array = table[...] if self.trained else jax.lax.stop_gradient(table[...])
            if places is None:
                every = sequence_parts.all_tokens(keys)
                return jax.lax.slice_in_dim(array, 0, every, axis=axis).astype(dtype)
            return jnp.take(array, places, axis, mode="clip").astype(dtype)

        def attend(hidden, keys):
            return attend_in_parts(synthesizer_attention, (hidden, keys, value), options)

        if self.kind == "dense":
            out = attend(own["hidden"], rows(self.table, of_keys))
        elif self.kind == "factorized_random":
            hidden = rows(self.rows, of_queries)
            hidden = jnp.broadcast_to(hidden, (batch, *hidden.shape[-3:]))
            out = attend(hidden, rows(self.table, of_keys))
        elif self.kind == "mixture":
            share = jax.nn.sigmoid(self.mixture[...]).astype(dtype)[None, None, :, None]
            query = (1 - share) * own["query"] * self.head_dim**-0.5
            of_places = rows(self.table, of_keys)
            of_places = jnp.broadcast_to(of_places, (batch, keys, *of_places.shape[-2:]))
            out = attend(
                jnp.concatenate([share * own["hidden"], query], -1),
                jnp.concatenate([of_places, tokens["key"]], -1),
            )
        elif self.kind == "factorized":
            of_call = {
                "is_causal": self.is_causal,
                "query_offset": options.get("query_offset", 0),
                "segment_ids": options.get("segment_ids"),
                "lengths": options.get("key_value_seq_lengths"),
            }
            logits = own["coarse"], own["fine"]
            out = attend_in_parts(factorized_synthesizer_attention, (*logits, value), of_call)
        else:
            # With the tokens in parts, each device has the rows and columns of all tokens.
            out = self._by_bias(rows(self.table, None, 2), value, of_queries, of_keys, options)
        return self.out(out)

    def _by_bias(self, bias, value, of_queries, of_keys, options):
        """Attention whose logits `(N, L, S)` are a bias of queries and keys of zero."""
        batch, tokens, heads, _ = value.shape
        if of_keys is not None:
            bias = jnp.moveaxis(bias[:, of_queries[..., None], of_keys[:, None]], 0, 1)
        elif of_queries is None:
            bias = jax.lax.slice_in_dim(bias, 0, bias.shape[2], axis=1)
        else:
            bias = jnp.moveaxis(jnp.take(bias, of_queries, 1, mode="clip"), 1, 0)
            tokens = bias.shape[-2]
        query = jnp.zeros((batch, tokens, self.num_heads, 1), value.dtype)
        key = jnp.zeros((*value.shape[:2], heads, 1), value.dtype)
        options = {**options, "bias": bias}
        return attend_in_parts(dot_product_attention, (query, key, value), options)
