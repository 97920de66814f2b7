"""Paged decode attention in the Triton language: plan and call of `paged_kernels`.

If sequences and key heads are too few to fill the GPU, the pages of a sequence are split into
several runs with one program each, and the results of the runs are combined by their log-sum-exps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays.combine import combine
from effattn.interfaces import paged_attention as interface
from effattn.interfaces.paged_attention import Config, Pages
from effattn.triton import launch

RUNS = 264  # target number of programs: two for each multiprocessor of the largest GPUs
MOST_ROWS = 128  # of a tile; the sums of more do not fit in registers
LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"),
    256,
    "Ampere or later; jax-triton; pages of 16 to 256 tokens, a power of two; up to "
    f"{MOST_ROWS} queries times query heads of a key head",
)


def refusal(query: jax.Array, keys: Pages, values: Pages, *_) -> str | None:
    """Returns the reason why the kernel cannot take these operands of `paged`, or None."""
    page = keys.array.shape[1]
    if reason := LIMITS.refusal(query.dtype, query.shape[-1], values.array.shape[-1]):
        return reason
    if page < launch.MIN_SIDE or page & (page - 1) or page > 256:
        return f"takes pages of 16 to 256 tokens, a power of two, got {page}"
    return interface.refusal(query, keys, values, MOST_ROWS) or launch.refusal()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the kernel.

    Attributes:
      queries, key_heads, group: T, K and N / K.
      size, value_size: H and Hv.
      page, room: tokens of a page, and pages of a sequence.
      runs, pages_of_run: runs of a sequence, and pages of a run.
      left, soft_cap: of `Config`.
      precision: of products: "tf32", or "tf32x3" for full float32.
    """

    queries: int
    key_heads: int
    group: int
    size: int
    value_size: int
    page: int
    room: int
    runs: int
    pages_of_run: int
    left: int | None
    soft_cap: float | None
    precision: str

    @property
    def rows(self) -> int:
        """R, a power of two."""
        return max(launch.MIN_SIDE, launch.power_of_2(self.group * self.queries))

    @property
    def width(self) -> int:
        """Features of a tile, a power of two."""
        return max(launch.MIN_SIDE, launch.power_of_2(self.size))

    @property
    def value_width(self) -> int:
        """Values of a tile, a power of two."""
        return max(launch.MIN_SIDE, launch.power_of_2(self.value_size))


@functools.partial(jax.jit, static_argnums=(0, 1))
def paged(
    config: Config,
    interpreted: bool,
    query: jax.Array,
    keys: Pages,
    values: Pages,
    table: jax.Array,
    lengths: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Paged decode attention; see `effattn.xla.paged_attention.paged` for arguments and results."""
    from effattn.triton import paged_kernels  # Triton is an optional package

    batch, queries, heads, size = query.shape
    pages, page, key_heads, _ = keys.array.shape
    value_size, room = values.array.shape[-1], table.shape[1]
    runs = max(1, min(room, RUNS // (batch * key_heads)))
    sizes = queries, key_heads, heads // key_heads, size, value_size, page, room
    precision = launch.precision(query.dtype, config.precision)
    plan = Plan(*sizes, runs, -(-room // runs), config.left, config.soft_cap, precision)
    of_runs = key_heads, runs, plan.rows
    pools = keys.array, values.array, keys.scales, values.scales
    out, lse = launch.call(
        paged_kernels.paged,
        plan,
        (1, key_heads, runs),
        (
            jnp.clip(table, 0, pages - 1).astype(jnp.int32),
            lengths.astype(jnp.int32),
            jnp.broadcast_to(scale, (batch,)).astype(jnp.float32),
            query,
            *(None if x is None else launch.Shared(x) for x in pools),
        ),
        [((*of_runs, value_size), jnp.float32), (of_runs, jnp.float32)],
        warps=8 if precision == "tf32x3" else 4,
        stages=3,
        interpreted=interpreted,
    )
    parts = range(runs)
    out, lse = combine([out[:, :, n] for n in parts], [lse[:, :, n] for n in parts])
    out, lse = (interface.by_token(x, queries, heads) for x in (out, lse))
    return out.astype(query.dtype), lse
