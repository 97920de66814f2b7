"""Attention whose weights depend on all logits of a query, in XLA.

The logits of a tile of queries with all keys are computed at a time, in memory O(t S) for a tile of
t queries. The backward pass computes each tile again, by `jax.checkpoint`; its derivatives are
those of JAX, in forward and reverse mode.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K, query length T in tiles of t,
key length S, head dimensions H and Hv.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.interfaces.block_attention import Config, Inputs
from effattn.xla import tiling
from effattn.xla.block_scores import ScoredTiles
from effattn.xla.walks import Rows, Whole

# `(logits, allowed, *arrays) -> weights`, hashable. Logits and weights are `(*B, K, G, t, S)`, at
# least float32. Logits are finite at all pairs; weights are zero where `allowed`, a bool array of
# that shape, is False.
Weigh = Callable[..., jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(config: Config, weigh: Weigh, x: Inputs, *arrays: jax.Array) -> tuple[jax.Array]:
    """The output `(*B, T, N, Hv)` in the dtype of `value`, in a tuple.

    `config.tile` has the number of queries in a tile; None is a default.
    """
    if 0 in (*x.query.shape, x.key.shape[-3]):
        return (jnp.zeros((*x.query.shape[:-1], x.value.shape[-1]), x.value.dtype),)
    operands, alike = mesh_axes.vary_alike((x._replace(constants=()), arrays))
    operands = operands._replace(constants=x.constants)
    tiles = _Rows(config, operands)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_tile(n, operands, arrays):
        return _Rows(config, operands).weighted_sum(n, weigh, arrays)

    if tiles.walk.query_tiles == 1:
        return (tiles.joined(of_tile(jnp.int32(0), operands, alike)[None]),)
    numbers = jnp.arange(tiles.walk.query_tiles, dtype=jnp.int32)
    return (tiles.joined(lax.map(lambda n: of_tile(n, operands, alike), numbers)),)


class _Rows(ScoredTiles):
    """Tiles of queries with all keys."""

    def _walk(self, backward):
        lengths = self.x.query.shape[-3], self.x.key.shape[-3]
        if tiling.is_open(*lengths):
            return Whole(lengths, lengths, always_masked=True)
        if self.config.tile is not None:
            queries = self.config.tile[0]
        else:
            rows = tiling.known_product(self.x.query.shape[:-3]) * self.x.query.shape[-2]
            queries = tiling.choose_rows(lengths, rows)
        return Rows((queries, lengths[1]), lengths, always_masked=True)

    def weighted_sum(self, n, weigh: Weigh, arrays):
        """The output of query tile n, `(*B, K, G, t, Hv)`."""
        ((_, _, patch),) = self.walk.runs(n)
        patch = patch(0)
        keys, values = self.key_rows(patch, self.x.key), self.key_rows(patch, self.x.value)
        products = self.products(self.scaled_query(n), keys)
        logits = self.scores(patch, products, None, self.x.scale, self.x.constants)
        logits, allowed = self._heads_apart(logits), self.allowed(patch)
        allowed = jnp.broadcast_to(True if allowed is None else allowed, logits.shape)
        weights = self._heads_together(weigh(logits, allowed, *arrays))
        weights = self.dropped(patch, weights).astype(values.dtype)
        return self._heads_apart(self.matmul(weights, values).astype(self.x.value.dtype))

    def joined(self, parts):
        """Joins the outputs of all tiles, `(n, *B, K, G, t, Hv)`, to `(*B, T, N, Hv)`."""
        out = jnp.moveaxis(parts, 0, -3)
        *batch, key_heads, group, tiles, size, features = out.shape
        if self.walk.queries_overlap:
            # The last tile is shifted back, over rows that the previous tile has.
            new = self.walk.lengths[0] - (tiles - 1) * size
            before = out[..., :-1, :, :].reshape(*out.shape[:-3], (tiles - 1) * size, features)
            out = jnp.concatenate([before, out[..., -1, size - new :, :]], -2)
        else:
            out = out.reshape(*out.shape[:-3], tiles * size, features)
        out = jnp.moveaxis(out, -2, -4)
        return out.reshape(*batch, out.shape[-4], key_heads * group, features)
