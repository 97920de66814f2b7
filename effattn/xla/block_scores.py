"""Scores of block attention: logits, masks, weights and dropout of a patch of pairs."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dropout, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.segments import positions_from
from effattn.xla.block_tiles import Tiles


class ScoredTiles(Tiles):
    """Tiles with the scores of their pairs."""

    def products(self, query, keys):
        """Raw scores `(*B, K, r, s)` of query rows `(*B, K, r, H)` and keys `(*B, K, s, H)`."""
        if self.x.additive is None:
            return self.matmul(query, keys, contract=-1)
        return self._additive(query, keys, self.x.additive)

    def _additive(self, query, keys, weights):
        query, keys, weights = (a.astype(self.dtype) for a in (query, keys, weights))
        hidden = jnp.tanh(query[..., :, None, :] + keys[..., None, :, :])
        return jnp.einsum("...krsh,kh->...krs", hidden, weights, precision=self.config.precision)

    def differentiated(self, query, query_columns, keys, d_additive):
        """Returns the products and their pull-back function.

        The pull-back maps gradients of the products to gradients of the query rows, of the keys
        `(*B, K, H, s)`, and of the additive weights (added to `d_additive`).
        """
        if self.x.additive is None:

            def gradients_of(d_products):
                d_keys = self.matmul(query_columns, d_products)
                return self.matmul(d_products, keys), d_keys, None

            return self.products(query, keys), gradients_of
        products, pull_back = jax.vjp(self._additive, query, keys, self.x.additive)

        def gradients_of_additive(d_products):
            d_rows, d_keys, d_weights = pull_back(d_products.astype(products.dtype))
            d_keys = jnp.swapaxes(d_keys.astype(self.dtype), -1, -2)
            return d_rows.astype(self.dtype), d_keys, dtypes.added(d_additive, d_weights)

        return products, gradients_of_additive

    def _along_keys(self, patch, first, ahead=0):
        """Expands one number per run of keys to one per key: key m of a run adds `ahead` * m."""
        size = patch.keys // (first.shape[-1] if first.ndim else 1)
        index = lead(jnp.arange(size, dtype=jnp.int32), first.ndim + 1)
        each = first[..., None] + ahead * index
        each = each.reshape(*first.shape[:-1], patch.keys)
        return each if each.ndim == 1 else each[..., None, None, :]

    def query_positions(self, patch):
        """Query positions `(t)`, or `(*B, t)` if the offset differs by example."""
        return positions_from(self.offset + patch.query_start, patch.queries)

    def key_positions(self, patch):
        """Key positions `(s)`, or `(*L, 1, 1, s)` in a layout that differs by head or example."""
        return self._along_keys(patch, patch.key_start, ahead=1)

    def _indices(self, patch):
        """Indices b, h, i and j of the patch's pairs, each `(*#B, #K, #G, #t, #s)`."""
        batch = self.x.key.shape[:-3]
        b = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(*batch, 1, 1, 1, 1)
        h = jnp.arange(math.prod(self.by_group), dtype=jnp.int32).reshape(*self.by_group, 1, 1)
        if self.x.positions is None:
            i, j = self.query_positions(patch), self.key_positions(patch)
        else:
            of_query, of_key = self.x.positions
            i = self._slice(of_query, patch.query_start, patch.queries)
            j = self.of_keys(patch, of_key)
        i = i[..., None, None, :, None]
        return tuple(lead(array, b.ndim) for array in (b, h, i, j))

    def scores(self, patch, products, bias, scale, constants):
        """The logits `(*B, K, r, s)` of a patch, before any mask."""
        scale = self.logit_scale if scale is None else scale.astype(products.dtype)
        logits = products if isinstance(scale, float) and scale == 1 else products * scale
        if bias is not None:
            bias = bias.astype(logits.dtype)
            logits = self._heads_together(self._heads_apart(logits) + bias)
        if self.config.soft_cap is not None:
            logits = self.config.soft_cap * jnp.tanh(logits / self.config.soft_cap)
        if self.config.score_mod is not None:
            logits = self._heads_apart(logits)
            score = functools.partial(self._score_at_origin, constants)
            at = self._indices(patch)
            logits = self._heads_together(_over_leading(score, logits.ndim, logits, *at))
        return logits.astype(products.dtype)

    def _score_at_origin(self, constants, logit, b, h, i, j):
        if self.config.origin is not None:
            b, h, i, j = self.config.origin(b, h, i, j)
        assert self.config.score_mod is not None
        return self.config.score_mod(constants, *mesh_axes.vary_alike((logit, b, h, i, j)))

    def activated(self, logits):
        """Weights by an elementwise activation in place of the softmax."""
        if self.config.activation == "sigmoid":
            return jax.nn.sigmoid(logits)
        if self.config.activation == "laplace":
            # The distribution function of a normal distribution, of mean sqrt(1/2) and variance
            # 1 / (4 pi) (Ma et al. 2022).
            return lax.erfc((0.5**0.5 - logits) * (2 * math.pi) ** 0.5) / 2
        return jnp.square(jax.nn.relu(logits))

    def weights(self, logits, lse, delta):
        """Returns the weights and the pull-back from their gradients to those of the logits."""
        if self.config.activation is None:
            weights = jnp.exp(logits - lse)
            return weights, lambda d_weights: weights * (d_weights - delta)
        weights, pull_back = jax.vjp(self.activated, logits)
        return weights, lambda d_weights: pull_back(d_weights)[0]

    def masked(self, patch, logits):
        """Sets the logits to -inf where a pair may not attend."""
        allowed = self.allowed(patch)
        if allowed is None:
            return logits
        return self._heads_together(jnp.where(allowed, self._heads_apart(logits), -jnp.inf))

    def allowed(self, patch):
        """Pairs that may attend, bool `(*#B, #K, #G, #t, #s)`; None if all pairs may."""
        if not patch.masked:
            return None
        x, config, axes = self.x, self.config, self.batch_axes + 4
        _, h, i, j = self._indices(patch)
        allowed = []
        if config.right is not None:
            allowed.append(j <= i + config.right)
        if config.left is not None:
            allowed.append(j >= i - config.left)
        if config.pattern is not None:
            allowed.append(config.pattern.allows(i, j, h))
        if self.walk.keys_overlap or x.layout is not None:
            index = self.key_positions(patch)
            of_new = self._along_keys(patch, patch.new_key)
            allowed.append(lead(index, axes) >= lead(of_new, axes))
        if self.rows_differ:
            index = patch.query_start + jnp.arange(patch.queries, dtype=jnp.int32)
            allowed.append((index >= patch.new_query)[:, None])
        if x.key_mask is not None:
            allowed.append(self.of_keys(patch, x.key_mask))
        if x.segments is not None:
            of_query, of_key = x.segments
            of_query = self._slice(of_query, patch.query_start, patch.queries)
            allowed.append(of_query[..., None, None, :, None] == self.of_keys(patch, of_key))
        if x.mask is not None:
            allowed.append(self.pairs(patch, x.mask))
        if not allowed:
            return None
        all_allow = functools.reduce(operator.and_, (lead(each, axes) for each in allowed))
        if config.pattern is not None:
            # Computed once for all heads; without the barrier XLA recomputes the mask at each use.
            all_allow = lax.optimization_barrier(all_allow)
        return all_allow

    def dropped(self, patch, weights):
        """Dropout of weights. Dropout is linear, so this is also its own pull-back."""
        rate = self.config.dropout_rate
        if rate == 0 or self.x.seed is None:
            return weights
        b, h, i, j = self._indices(patch)
        if self.config.origin is not None:
            b, h, i, j = self.config.origin(b, h, i, j)
        keep = dropout.keep(self.x.seed, rate, b, h, i, j)
        return self._heads_together(jnp.where(keep, self._heads_apart(weights) / (1 - rate), 0))


def _over_leading(function, axes: int, *arrays):
    """Maps `function` over the first `axes` axes of the arrays, which broadcast."""
    if axes == 0:
        return function(*arrays)
    shared = [array.shape[0] == 1 for array in arrays]
    shared = [False] * len(arrays) if all(shared) else shared
    parts = [array[0] if s else array for array, s in zip(arrays, shared, strict=True)]
    mapped = jax.vmap(
        functools.partial(_over_leading, function, axes - 1),
        in_axes=[None if s else 0 for s in shared],
    )
    return mapped(*parts)
