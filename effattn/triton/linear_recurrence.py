"""Linear recurrence in the Triton language: plans and calls of `recurrence_kernels`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.recurrence import BLOCK, Arrays, Gradients, How
from effattn.pallas.recurrence_delta import Chunks, DeltaKernels, with_delta
from effattn.triton import launch

LIMITS = dispatch.Limits(("float32", "bfloat16", "float16"), 256, "Ampere or later; jax-triton")
# Largest number of features, and of values, of a tile of the state: `TILES` in the walks and in
# `read`, `TILES_OF_GRADIENTS` in `gradients`. A product in full float32 is three products, whose
# operands take three times the registers, and `gradients` also keeps an array of all pairs of a
# block in registers.
TILES = {"tf32": 64, "tf32x3": 32}
TILES_OF_GRADIENTS = {"tf32": 64, "tf32x3": 16}


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    return recurrence.refusal(config, x) or launch.refusal()


def forward(config: Config, x: Inputs):
    """Returns `((output, state), saved)`; see `effattn.pallas.recurrence.forward`."""
    return recurrence.forward(KERNELS, config, x)


def backward(config: Config, x: Inputs, saved, d_output, d_state) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.recurrence.backward`."""
    return recurrence.backward(KERNELS, config, x, saved, d_output, d_state)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of the kernels: T, N, K, V, F, D, and the kind of decay.

    Attributes:
      length, query_heads, key_heads, value_heads, features, values: sizes of the arrays.
      decay: "none", one for a "token", or one for each "feature" of a token.
      precision: of products: "tf32", or "tf32x3" for full float32.
      tile_f, tile_d: numbers of features and of values of a tile of the state.
      warps: number of warps of a program: a thread has at most 16 entries of a tile of the state,
        or 32 of all tiles of a program.
      kept_features: number of decays of a chunk in the delta form: 1, or F.
      with_value: whether the gradients include that of the values.
    """

    length: int
    query_heads: int
    key_heads: int
    value_heads: int
    features: int
    values: int
    decay: str
    precision: str
    tile_f: int
    tile_d: int
    warps: int
    kept_features: int = 1
    with_value: bool = True

    @property
    def blocks(self) -> int:
        """Number of blocks of tokens; the last block can be partial."""
        return -(-self.length // BLOCK)

    @property
    def heads(self) -> int:
        """Number of heads of the output."""
        return max(self.query_heads, self.value_heads)

    @property
    def group(self) -> int:
        """Number of heads of the output that read one value head."""
        return self.heads // self.value_heads

    @property
    def tiles_f(self) -> int:
        """Number of tiles of features."""
        return -(-self.features // self.tile_f)

    @property
    def tiles_d(self) -> int:
        """Number of tiles of values."""
        return -(-self.values // self.tile_d)

    @property
    def whole_f(self) -> int:
        """Number of features of saved states."""
        return _whole(self.features, self.precision)

    @property
    def whole_d(self) -> int:
        """Number of values of saved states."""
        return _whole(self.values, self.precision)


def _side(size: int, most: int) -> int:
    """Side of a tile, a power of two."""
    return max(launch.MIN_SIDE, min(most, launch.power_of_2(size)))


def _whole(size: int, precision: str) -> int:
    """Number of features or values of a saved state: those of whole tiles of the walks."""
    side = _side(size, TILES[precision])
    return -(-size // side) * side


def _plan(how: How, arrays: Arrays) -> Plan:
    decay = "none"
    if arrays.log_decay is not None:
        decay = "token" if arrays.log_decay.ndim == 3 else "feature"
    _, length, query_heads, features = arrays.query.shape
    key_heads, (value_heads, values) = arrays.key.shape[2], arrays.value.shape[2:]
    precision = "tf32x3" if how.precision == lax.Precision.HIGHEST else "tf32"
    sizes = length, query_heads, key_heads, value_heads, features, values
    tile_f, tile_d = (_side(size, TILES[precision]) for size in (features, values))
    warps = 8 if tile_f == tile_d == 64 else 4
    return Plan(*sizes, decay, precision, tile_f, tile_d, warps)


def _kernels() -> Any:
    """Imported at the first call, as Triton is an optional package."""
    from effattn.triton import recurrence_kernels

    return recurrence_kernels


def _forward(how: How, arrays: Arrays, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    states, last = _states(how, arrays, state)
    return _read(how, arrays, states), last


def _backward(how: How, arrays: Arrays, state, d_out, d_state) -> Gradients:
    states, _ = _states(how, arrays, state)
    operands = arrays.query, _scale(arrays), d_out, arrays.log_decay, d_state
    co_states, first = _walk(how, arrays, "walk_back", operands)
    query, key, log_decay, value = _of_blocks(how, arrays, states, co_states, d_out)
    return Gradients(query, key, value, log_decay, first)


def _states(how, arrays, state):
    """The states before the blocks, and the state after the last one."""
    return _walk(how, arrays, "walk", (arrays.key, arrays.value, arrays.log_decay, state))


def _walk(how, arrays, name, operands):
    plan = _plan(how, arrays)
    grid = 1, plan.value_heads, plan.tiles_f * plan.tiles_d
    return _call(how, plan, name, grid, operands, [_saved(plan, arrays), _state(plan)])


def _read(how: How, arrays: Arrays, states: jax.Array) -> jax.Array:
    plan = _plan(how, arrays)
    grid, result = (plan.blocks, plan.heads, plan.tiles_d), (plan.length, plan.heads, plan.values)
    operands = *_terms(arrays), states
    (out,) = _call(how, plan, "read", grid, operands, [(result, how.dtype)], stages=1)
    return out


def _gradients(how: How, arrays: Arrays, states, co_states, d_out):
    return _of_blocks(how, arrays, states, co_states, d_out, with_value=False)[:3]


def _of_blocks(how, arrays, states, co_states, d_out, *, with_value=True):
    """The gradients of queries, keys, log decays and values (None if not asked)."""
    plan = _plan(how, arrays)
    most = TILES_OF_GRADIENTS[plan.precision]
    tile_f, tile_d = min(plan.tile_f, most), min(plan.tile_d, most)
    plan = dataclasses.replace(plan, tile_f=tile_f, tile_d=tile_d, with_value=with_value)
    unused = (1,), jnp.float32
    query, key, value = (
        ((plan.length, plan.heads, array.shape[3]), _narrowest(how, array, plan.heads == heads))
        for array, heads in (
            (arrays.query, plan.query_heads),
            (arrays.key, plan.value_heads),
            (arrays.value, plan.value_heads),
        )
    )
    log_decay = unused
    if plan.decay != "none":
        sizes = arrays.log_decay.shape[3:]
        log_decay = (plan.length, plan.heads, *sizes), jnp.float32
    results = [query, key, value if with_value else unused, log_decay]
    grid, operands = (plan.blocks, plan.heads, 1), (d_out, *_terms(arrays), states, co_states)
    query, key, value, log_decay = _call(how, plan, "gradients", grid, operands, results, stages=1)
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    group = key.shape[2] // plan.value_heads
    return (
        query,
        recurrence.over_group(group, key, 2),
        None if plan.decay == "none" else recurrence.over_group(group, log_decay, 2),
        recurrence.over_group(group, value, 2) if with_value else None,
    )


def _narrowest(how, array, is_whole):
    """Dtype of a gradient: that of the array, or float32 if XLA adds to it afterwards."""
    is_narrow = is_whole and jnp.dtype(how.dtype).itemsize == 2
    return array.dtype if is_narrow else jnp.float32


def _terms(arrays):
    return arrays.query, _scale(arrays), arrays.key, arrays.value, arrays.log_decay


def _scale(arrays):
    """The scale of each example, `(B,)`."""
    if arrays.scale is None:
        return None
    return jnp.broadcast_to(arrays.scale, arrays.query.shape[:1])


# The delta form


def _corrected(how: How, arrays: Arrays, chunks: Chunks, state: jax.Array):
    operands = chunks.recalled, chunks.key, chunks.kept, chunks.value, state
    return _walk_whole(how, arrays, "correct", chunks, operands)


def _corrected_back(how: How, arrays: Arrays, chunks: Chunks, d_state: jax.Array):
    of_keys = chunks.recalled, chunks.key, chunks.kept
    operands = *of_keys, chunks.query, chunks.value, chunks.d_out, d_state
    return _walk_whole(how, arrays, "correct_back", chunks, operands)


def _walk_whole(how, arrays, name, chunks, operands):
    """Returns corrected values `(B, V, n, C, D)`, saved states, and the last state."""
    plan = _plan(how, arrays)
    # A program has all features of these values, and no more numbers than one whole tile, but at
    # least as many values as a product takes.
    most = TILES[plan.precision] ** 2 // launch.power_of_2(plan.whole_f)
    tile_d = max(launch.MIN_SIDE, min(plan.tile_d, most))
    plan = dataclasses.replace(plan, tile_d=tile_d, kept_features=chunks.kept.shape[3])
    corrected = (plan.value_heads, plan.blocks, BLOCK, plan.values), jnp.float32
    grid = 1, plan.value_heads, plan.whole_d // plan.tile_d
    results = [corrected, _saved(plan, arrays), _state(plan)]
    return _call(how, plan, name, grid, operands, results, stages=1)


def _saved(plan, arrays):
    """Shape and dtype of saved states. In float16 large states would overflow."""
    shape = plan.value_heads, plan.blocks, plan.whole_f, plan.whole_d
    return shape, jnp.bfloat16 if arrays.key.dtype == jnp.bfloat16 else jnp.float32


def _state(plan):
    """Shape and dtype of the first or the last state."""
    return (plan.value_heads, plan.features, plan.values), jnp.float32


def _call(how, plan, name, grid, operands, results, stages=2):
    kernel = getattr(_kernels(), name)
    options = {"warps": plan.warps, "stages": stages, "interpreted": bool(how.interpreted)}
    return launch.call(kernel, plan, grid, operands, results, **options)


KERNELS = with_delta(
    recurrence.Kernels(_forward, _backward),
    DeltaKernels(_read, _gradients, _corrected, _corrected_back),
)
