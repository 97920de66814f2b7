"""Cases of the GPU benchmark: shapes, operands, operation and byte counts, and references."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import (
    PASSES,
    PRODUCTS,
    Arrays,
    checked_rows,
    linear_weights,
    recurrent_weights,
    scalar_gate,
    softmax_weights,
    unit,
    vector_gate,
    write_strength,
)

DTYPE = jnp.bfloat16


class Sizes(NamedTuple):
    """Sizes of all cases; the default is FlashAttention-3's benchmark suite.

    Attributes:
      tokens: tokens in a batch, examples times length.
      hidden: heads times head size.
      lengths, head_sizes: sizes of exact attention.
      length, head_size: sizes of all other cases.
      group: query heads per key head in cases with grouped heads.
      windows: window sizes in keys.
      documents: number of documents packed into all tokens.
      block: block size of block-sparse attention, in tokens.
      densities: shares of visited blocks, in percent.
      bigbird: block size of BigBird, in tokens.
      longformer: tokens on each side of the window, and global tokens.
      decode: (sequences, tokens in each sequence).
      page: page size in tokens.
      square: rows of the matrices in the measured product.
      copied: numbers in the array of the measured copy.
    """

    tokens: int = 16384
    hidden: int = 2048
    lengths: tuple[int, ...] = (8192, 2048, 16384, 4096, 1024, 512)
    head_sizes: tuple[int, ...] = (128, 64, 256)
    length: int = 8192
    head_size: int = 128
    group: int = 4
    windows: tuple[int, ...] = (1024, 128)
    documents: int = 16
    block: int = 128
    densities: tuple[int, ...] = (10, 5, 20, 50)
    bigbird: int = 64
    longformer: tuple[int, int] = (256, 64)
    decode: tuple[tuple[int, int], ...] = ((64, 8192), (1, 65536), (8, 16384))
    page: int = 64
    square: int = 8192
    copied: int = 2**28


FULL = Sizes()
TINY = Sizes(
    tokens=128,
    hidden=64,
    lengths=(64,),
    head_sizes=(16,),
    length=64,
    head_size=16,
    group=2,
    windows=(16,),
    documents=3,
    block=16,
    densities=(50,),
    bigbird=16,
    longformer=(8, 4),
    decode=((2, 40),),
    page=16,
    square=64,
    copied=1024,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Computation with one shape.

    Attributes:
      comparison: name of the comparison.
      variant: name of the case within the comparison.
      batch, length, heads, kv_heads, head_size: shape.
      pairs: query-key pairs per head; for a recurrence, pairs of a token and a feature. A pair
        costs a product of two vectors of length `head_size`.
      weights: weights of one head, as in `benchmarks.workloads.Workload`.
      gates: key `(B, T, K, H)` -> (key to use, *operands after the value).
      allowed: (queries, keys, *tables) -> bool, by operators that NumPy and PyTorch share; None for
        a recurrence.
      tables: arrays that `allowed` indexes.
      options: options for the contenders' functions.
      passes: passes to measure, from `PASSES`.
    """

    comparison: str
    variant: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    pairs: int
    weights: Callable[..., jax.Array]
    gates: Callable[[jax.Array], tuple[jax.Array, ...]] = lambda key: (key,)
    allowed: Callable[..., Any] | None = None
    tables: Sequence[np.ndarray] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    passes: Sequence[str] = PASSES

    def operands(self, draws: Arrays) -> list[jax.Array]:
        """Returns query, key, value, gates and output gradient, from flat arrays of draws."""
        tokens = (self.batch, self.length)
        shapes = [(*tokens, n, self.head_size) for n in self._heads]
        query, key, value, gradient = (
            draw[: np.prod(shape)].reshape(shape) for draw, shape in zip(draws, shapes, strict=True)
        )
        key, *others = self.gates(key)
        return [query, key, value, *others, gradient]

    @property
    def _heads(self):
        return self.heads, self.kv_heads, self.kv_heads, self.heads

    @property
    def rows(self) -> np.ndarray:
        """Checked queries of the first example."""
        return checked_rows(self.length)

    def checked(self, operands: Arrays) -> list[Any]:
        """Returns the operands of the first head of the first example, for the reference."""
        return [operand[:1, :, :1] for operand in operands]

    def flops(self, which: str) -> int:
        """Returns the floating-point operations of the matrix products, as in FlashAttention."""
        return PRODUCTS[which] * 2 * self.batch * self.heads * self.pairs * self.head_size

    def traffic(self, operands: Arrays, which: str) -> int:
        """Returns the least bytes moved: each pass reads operands and writes results once.

        The backward pass of softmax attention also reads the output. Log-sum-exps and states are
        not counted.
        """
        *inputs, out = (operand.size * operand.dtype.itemsize for operand in operands)
        forward = sum(inputs) + out
        if which == "forward":
            return forward
        return forward + 2 * sum(inputs) + out * (1 if self.allowed is None else 2)


class Paged(Case):
    """Paged decoding: one query per sequence, `length` keys on pages in random order."""

    def operands(self, draws: Arrays) -> list[jax.Array]:
        """Returns query, pages of keys, pages of values, and an array of the output's shape."""
        table = self.options["block_table"]
        pages = (table.size, self.options["page"], self.kv_heads, self.head_size)
        shapes = ((self.batch, 1, self.heads, self.head_size), pages, pages)
        drawn = [jax.random.normal(jax.random.key(n), s, DTYPE) for n, s in enumerate(shapes)]
        return [*drawn, drawn[0]]

    @property
    def rows(self) -> np.ndarray:
        """Index of the only query."""
        return np.zeros(1, int)

    def checked(self, operands: Arrays) -> list[Any]:
        """Returns the operands of the first sequence and head, with pages in order."""
        query, keys, values, gradient = operands
        own = self.options["block_table"][0]
        in_order = [pages[own, :, :1].reshape(1, -1, 1, self.head_size) for pages in (keys, values)]
        return [query[:1, :, :1], *(x[:, : self.length] for x in in_order), gradient[:1, :, :1]]


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yields all cases: first one case of each comparison, then the other variants.

    A run that ends early has measured the most interesting cases.
    """
    exact = [
        _exact(sizes, is_causal, length, head_size)
        for length in sizes.lengths
        for head_size in sizes.head_sizes
        for is_causal in (True, False)
    ]
    windows = [_window(sizes, keys) for keys in sizes.windows]
    sparse = [_block_sparse(sizes, density) for density in sizes.densities]
    decode = [_decode(sizes, *sequences) for sequences in sizes.decode]
    yield from exact[:2]
    yield windows[0]
    yield sparse[0]
    yield _recurrence(sizes, "vector gate")
    yield decode[0]
    yield _grouped(sizes)
    yield _documents(sizes)
    for name in RECURRENCES:
        if name != "vector gate":
            yield _recurrence(sizes, name)
    yield _bigbird(sizes)
    yield _longformer(sizes)
    yield from exact[2:4]
    yield from windows[1:]
    yield from decode[1:]
    yield from sparse[1:]
    yield from exact[4:]


def _case(sizes, comparison, variant, length, head_size, pairs, weights, kv_heads=None, **fields):
    heads = sizes.hidden // head_size
    batch = sizes.tokens // length
    return Case(
        comparison, variant, batch, length, heads, kv_heads or heads, head_size, pairs, weights,
        **fields,
    )  # fmt: skip


def _softmax(sizes, comparison, variant, length, pairs, allowed, *, head_size=None, **fields):
    tables = fields.get("tables", ())

    def weights(query, key, position):
        # `allowed` is computed on the host, because the tables are NumPy arrays.
        return softmax_weights(
            query, key, allowed(np.asarray(position), np.arange(length), *tables)
        )

    return _case(
        sizes, comparison, variant, length, head_size or sizes.head_size, pairs, weights,
        allowed=allowed, **fields,
    )  # fmt: skip


def _causal(i, j):
    return j <= i


def _all(i, j):
    return (j >= 0) & (i >= 0)


def _exact(sizes, is_causal, length, head_size):
    return _softmax(
        sizes,
        "causal" if is_causal else "bidirectional",
        f"{length}, {head_size}",
        length,
        length * (length + 1) // 2 if is_causal else length**2,
        _causal if is_causal else _all,
        head_size=head_size,
        options={"is_causal": is_causal},
    )


def _grouped(sizes):
    heads, length = sizes.hidden // sizes.head_size, sizes.length
    return _softmax(
        sizes, "grouped", f"{length}, {sizes.group} a key head", length,
        length * (length + 1) // 2, _causal, kv_heads=heads // sizes.group,
        options={"is_causal": True},
    )  # fmt: skip


def _window(sizes, keys):
    length = sizes.length
    return _softmax(
        sizes,
        "window",
        f"{length}, {keys} keys",
        length,
        int(np.minimum(np.arange(length) + 1, keys).sum()),
        lambda i, j: (j <= i) & (i - j < keys),
        options={"is_causal": True, "local_window_size": (keys - 1, 0)},
    )


def _documents(sizes):
    length = sizes.tokens
    starts = np.sort(np.random.default_rng(0).permutation(length - 1)[: sizes.documents - 1] + 1)
    ids = 1 + np.searchsorted(starts, np.arange(length), side="right").astype(np.int32)
    counts = np.bincount(ids)
    return _softmax(
        sizes,
        "documents",
        f"{length}, {sizes.documents} documents",
        length,
        int((counts * (counts + 1) // 2).sum()),
        lambda i, j, ids: (j <= i) & (ids[i] == ids[j]),
        tables=(ids,),
        options={"is_causal": True},
    )


def _in_blocks(sizes, comparison, variant, mask, block, **options):
    """Returns a case over the pairs in the blocks of a mask."""
    return _softmax(
        sizes,
        comparison,
        variant,
        sizes.length,
        int(mask.sum()) * block**2,
        lambda i, j, mask: mask[i // block, j // block],
        tables=(mask,),
        options={"block_size": block, **options},
    )


def _block_sparse(sizes, density):
    """Returns a case with the same number of random blocks in each row."""
    blocks = sizes.length // sizes.block
    kept = max(1, round(blocks * density / 100))
    ranks = np.random.default_rng(0).permuted(np.tile(np.arange(blocks), (blocks, 1)), axis=1)
    mask = ranks < kept
    variant = f"{sizes.length}, {density} %"
    return _in_blocks(sizes, "block sparse", variant, mask, sizes.block, block_mask=mask)


def _bigbird(sizes):
    """Returns a case with a window of 3 blocks, a global first block, and 3 random blocks."""
    blocks = sizes.length // sizes.bigbird
    at = np.arange(blocks)
    random = np.random.default_rng(0).integers(blocks, size=(blocks, 3)).astype(np.int32)
    mask = (abs(at[:, None] - at) <= 1) | (at == 0) | (at[:, None] == 0)
    np.put_along_axis(mask, random, True, axis=1)
    return _in_blocks(
        sizes, "bigbird", f"{sizes.length}, blocks of {sizes.bigbird}", mask, sizes.bigbird,
        random_blocks=random,
    )  # fmt: skip


def _longformer(sizes):
    """Returns a case with a window and global first tokens."""
    length, (side, first) = sizes.length, sizes.longformer
    row = np.arange(first, length)
    near = np.minimum(row + side, length - 1) - np.maximum(row - side, first) + 1
    return _softmax(
        sizes,
        "longformer",
        f"{length}, {side} a side, {first} global",
        length,
        int(first * length + (near + first).sum()),
        lambda i, j: ((i - j <= side) & (j - i <= side)) | (j < first) | (i < first),
        options={"local_window_size": side, "max_global": first},
    )


def retention_log_decay(heads: int) -> np.ndarray:
    """Returns RetNet's log decays by head, float32."""
    return np.log1p(-(2.0 ** (-5.0 - np.arange(heads)))).astype(np.float32)


def state_space_rate(heads: int) -> np.ndarray:
    """Returns initial values of Mamba-2's A by head, float32."""
    return -np.linspace(1, 16, heads, dtype=np.float32)


def step_size(key: jax.Array) -> jax.Array:
    """Returns Mamba-2's dt, from keys `(..., H)` in place of a projection."""
    return jax.nn.softplus(key[..., 0] - 4)


def _retention_weights(query, key, position):
    return recurrent_weights(query, key, position, jnp.asarray(retention_log_decay(1)))


def _state_space_weights(query, key, position, step):
    query = query * query.shape[-1] ** 0.5  # state-space duality has no scale
    weights = recurrent_weights(query, key, position, (step * state_space_rate(1))[..., None])
    return weights * step[:, None]


def _gated_weights(query, key, position, log_decay):
    decay = log_decay if log_decay.ndim == key.ndim else log_decay[..., None]
    return recurrent_weights(query, key, position, decay)


def _delta_weights(query, key, position, *gates):
    *log_decay, beta = gates
    decay = log_decay[0][..., None] if log_decay else jnp.zeros(())
    return recurrent_weights(query, key, position, decay, beta)


def _float32(gate):
    return lambda key: (key, gate(key.astype(jnp.float32)))


def _delta_gates(key, *, gated):
    exact = key.astype(jnp.float32)
    log_decay = [scalar_gate(exact)] if gated else []
    return unit(exact).astype(key.dtype), *log_decay, write_strength(exact).astype(key.dtype)


# Weights and gates of each recurrence; log decays and step sizes are float32.
RECURRENCES: dict[str, tuple[Callable, Callable]] = {
    "linear": (linear_weights, lambda key: (key,)),
    "retention": (_retention_weights, lambda key: (key,)),
    "vector gate": (_gated_weights, _float32(vector_gate)),
    "scalar gate": (_gated_weights, _float32(scalar_gate)),
    "state space": (_state_space_weights, _float32(step_size)),
    "delta rule": (_delta_weights, functools.partial(_delta_gates, gated=False)),
    "gated delta rule": (_delta_weights, functools.partial(_delta_gates, gated=True)),
}


def _recurrence(sizes, name):
    weights, gates = RECURRENCES[name]
    pairs = sizes.length * sizes.head_size
    variant = f"{sizes.length}, {sizes.head_size}"
    return _case(sizes, name, variant, sizes.length, sizes.head_size, pairs, weights, gates=gates)


def _decode(sizes, sequences, length):
    heads = sizes.hidden // sizes.head_size
    pages = -(-length // sizes.page)
    table = np.random.default_rng(0).permutation(sequences * pages).astype(np.int32)
    return Paged(
        comparison="decode",
        variant=f"{sequences} of {length}",
        batch=sequences,
        length=length,
        heads=heads,
        kv_heads=heads // sizes.group,
        head_size=sizes.head_size,
        pairs=length,
        weights=lambda query, key, position: softmax_weights(query, key, True),
        allowed=_all,
        options={"block_table": table.reshape(sequences, pages), "page": sizes.page},
        passes=("forward",),
    )
