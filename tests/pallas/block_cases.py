"""Calls that every kernel of block attention must get right, forward and backward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from effattn import dispatch, patterns
from effattn.nn.alibi import Alibi
from effattn.patterns.layouts import BlockLayout
from tests.dense import draw, with_gradients

ATTEND = effattn.dot_product_attention


@dataclasses.dataclass(frozen=True)
class Case:
    """A call `function(**arrays, **options)`; `more` are shapes of further arrays.

    `options` is a function that returns the options, because the options may hold arrays.
    """

    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: Callable[[], dict[str, Any]] = dict
    function: Callable[..., Any] = ATTEND
    more: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    rounded_to: Any = np.float32

    def arrays(self, dtype=np.float64) -> dict[str, np.ndarray]:
        shape = {"queries": 70, "keys": 150, "size": 16, "value_size": 24, **self.sizes}
        arrays = draw(**shape, dtype=np.float64)
        rng = np.random.default_rng(5)
        more = {name: rng.normal(size=shape) for name, shape in self.more.items()}
        # The arrays have the same values in every precision.
        rounded = {name: x.astype(self.rounded_to) for name, x in (arrays | more).items()}
        return {name: x.astype(dtype) for name, x in rounded.items()}

    def run(self, implementation, dtype):
        """`((out, lse), gradients)`."""
        call = functools.partial(
            self.function, **self.options(), implementation=implementation, return_residual=True
        )

        def function(arrays, _):
            return call(**arrays)

        return with_gradients(function, self.arrays(dtype))


def square(length=150, **sizes):
    return {"queries": length, "keys": length, **sizes}


def interpreted(case: Case, implementation: str, dtype=np.float32) -> Any:
    """The case, run by an interpreted kernel."""
    with dispatch.interpreted():
        return case.run(implementation, dtype)


def exact(case: Case) -> Any:
    """The case by XLA in float64; the laws check XLA against the definition."""
    with jax.enable_x64(True):
        return case.run("xla", np.float64)


IDS = np.repeat([[1, 2, 3, 0], [5, 2, 9, 9]], [30, 40, 50, 30], axis=1)


def tabled(query, key, value, slopes, table, shift, **options):
    """A score_mod that reads tables by head and by position, and a number."""

    def score_mod(logit, b, h, i, j):
        near = jnp.clip(i - j, 0, 7)
        return logit * jnp.exp(shift) - slopes[h] * jnp.abs(i - j) + table[near, h]

    return ATTEND(query, key, value, score_mod=score_mod, **options)


def over_layout(leading, with_full, **more):
    def function(query, key, value, *, tile=(32, 16), **options):
        lengths = query.shape[-3], key.shape[-3]
        grid = [-(-length // side) for length, side in zip(lengths, tile, strict=True)]
        rng = np.random.default_rng(0)
        blocks, full = rng.random((2, *leading, *grid)) < 0.5
        full = full if with_full else None
        layout = BlockLayout.from_block_mask(blocks, full=full, tile=tile, lengths=lengths)
        return effattn.sparse_attention(query, key, value, layout=layout, **options, **more)

    return function


def traced_layout(query, key, value, **options):
    """Block-sparse attention with a layout that is chosen from the data."""
    blocks = jnp.einsum("btnh,bsnh->bts", query[:, ::32, ::2], key[:, ::16]) > 0
    layout = BlockLayout.from_block_mask(
        jax.lax.stop_gradient(blocks)[:, None],
        tile=(32, 16),
        lengths=(query.shape[-3], key.shape[-3]),
    )
    return effattn.sparse_attention(query, key, value, layout=layout, **options)


def mapped(query, key, value, **options):
    """vmap over the documents, so that no batch axis is left inside."""
    ids = jnp.asarray(np.stack([IDS[0], IDS[1]]))

    def one(query, key, value, ids):
        return ATTEND(query, key, value, segment_ids=ids, **options)

    return jax.vmap(one)(query, key, value, ids)


TILE = {"tile": (32, 16)}
# The pattern needs tables, divisions and remainders.
PATTERN = patterns.Causal() & (
    patterns.RandomBlocks(16, 2, seed=0) | patterns.Custom(lambda i, j: (i - j) % 5 == 0)
)

# Rows that a finite bias masks: beside -1e9, float32 keeps neither the other logits nor the number
# of keys.
BLURRED = Case(
    square(150),
    lambda: {"bias": np.float32(np.where(np.tri(150, k=-5), 0, -1e9))[None, None]},
)

# One quick case of documents runs on every kernel; the other cases are slow.
QUICK = ("documents",)
CASES = {
    "layout tiles past the last key": Case(
        {"queries": 20, "keys": 160}, lambda: {"tile": (16, 96)}, over_layout((), False)
    ),
    "bias of some batch axes": Case(
        {"batch": (2, 3), "queries": 20, "keys": 20}, more={"bias": (2, 1, 4, 20, 20)}
    ),
    "tails and a bias of heads": Case(more={"bias": (1, 4, 1, 1)}),
    "one row": Case({"queries": 1, "keys": 1}),
    "one query": Case({"queries": 1}, lambda: {"is_causal": True, "query_offset": 149}),
    "batch axes": Case({"batch": (2, 1, 3), "queries": 20, "keys": 20, "key_heads": 1}),
    "heads of 200 and 40": Case(square(40, size=200, value_size=40), lambda: {"is_causal": True}),
    "window": Case(square(), lambda: {"local_window_size": (37, 5)} | TILE),
    "offsets and a bias of queries": Case(
        {},
        lambda: {"is_causal": True, "query_offset": jnp.array([80, 3]), **TILE},
        more={"bias": (1, 4, 70, 1)},
    ),
    "documents": Case(
        square(), lambda: {"segment_ids": jnp.asarray(IDS), "is_causal": True, **TILE}
    ),
    "mask and lengths": Case(
        {},
        lambda: {
            "mask": np.random.default_rng(1).random((2, 1, 70, 150)) < 0.6,
            "query_seq_lengths": jnp.array([70, 40]),
            "key_value_seq_lengths": jnp.array([61, 0]),
            **TILE,
        },
    ),
    "bias of keys": Case({}, lambda: TILE, more={"bias": (2, 1, 1, 150)}),
    "ALiBi and no groups": Case(
        square(key_heads=4), lambda: {"score_mod": Alibi(4), "is_causal": True, **TILE}
    ),
    "tables, cap, scale and sink": Case(
        square(70),
        lambda: {"logits_soft_cap": 2.0, "is_causal": True, **TILE},
        tabled,
        {"slopes": (4,), "table": (8, 4), "shift": (), "scale": (), "sink": (4,)},
    ),
    "dropout and a bias": Case(
        square(70),
        lambda: {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1), **TILE},
        more={"bias": (1, 1, 70, 70)},
    ),
    "layout of heads": Case({}, dict, over_layout((2,), True)),
    "layout of examples and documents": Case(
        square(), lambda: {"segment_ids": jnp.asarray(IDS)}, over_layout((2, 2), True)
    ),
    "traced layout": Case(square(160, value_size=16), dict, traced_layout),
    "large tiles of a layout": Case({}, lambda: {"tile": (64, 96)}, over_layout((), True)),
    "pattern": Case(
        square(),
        lambda: {"pattern": PATTERN},
        effattn.sparse_attention,
    ),
    "dilated": Case(
        square(),
        lambda: {"local_window_size": (9, 0), "dilation": 3, "score_mod": Alibi(4)},
        effattn.sliding_window_attention,
    ),
    "Longformer": Case(
        square(),
        lambda: {
            "local_window_size": 10,
            "global_mask": jnp.zeros((2, 150), bool).at[:, 5].set(True),
            "max_global": 2,
        },
        effattn.longformer_attention,
    ),
    "vmap": Case(square(), lambda: {"is_causal": True, **TILE}, mapped),
}
