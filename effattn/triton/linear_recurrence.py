"""Linear recurrence in the Triton language: plans and calls of `recurrence_kernels`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn import dispatch
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas import recurrence
from effattn.pallas.recurrence import BLOCK, Arrays, How
from effattn.pallas.recurrence_delta import Chunks
from effattn.triton import launch

LIMITS = dispatch.Limits(("float32", "bfloat16", "float16"), 256, "Ampere or later; jax-triton")
# Largest number of features, and of values, of a tile of the state. A product in full float32 is
# three products, whose operands take three times the registers.
TILES = {"tf32": 64, "tf32x3": 32}


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
      kept_features: number of decays of a chunk in the delta form: 1, or F.
      precision: of products: "tf32", or "tf32x3" for full float32.
    """

    length: int
    query_heads: int
    key_heads: int
    value_heads: int
    features: int
    values: int
    decay: str
    kept_features: int
    precision: str

    @property
    def tile(self) -> int:
        """Largest side of a tile of the state."""
        return TILES[self.precision]

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
    def tile_f(self) -> int:
        """Number of features of a tile."""
        return self._side(self.features)

    @property
    def tile_d(self) -> int:
        """Number of values of a tile."""
        return self._side(self.values)

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
        return self.tile_f * self.tiles_f

    @property
    def whole_d(self) -> int:
        """Number of values of saved states."""
        return self.tile_d * self.tiles_d

    @property
    def all_f(self) -> int:
        """Number of features of a program that has all of them (delta form), a power of two."""
        return launch.power_of_2(self.whole_f)

    @property
    def narrow(self) -> int:
        """Number of values of the state slice of a program of the delta form."""
        return max(launch.MIN_SIDE, min(self.tile_d, self.tile**2 // self.all_f))

    @property
    def warps(self) -> int:
        """Number of warps: a thread has at most 16 entries of a tile, 32 of a state slice."""
        return 8 if self.tile_f == self.tile_d == 64 else 4

    def _side(self, size: int) -> int:
        return max(launch.MIN_SIDE, min(self.tile, launch.power_of_2(size)))


def _plan(how: How, arrays: Arrays, kept_features: int = 1) -> Plan:
    decay = "none"
    if arrays.log_decay is not None:
        decay = "token" if arrays.log_decay.ndim == 3 else "feature"
    _, length, query_heads, features = arrays.query.shape
    key_heads, (value_heads, values) = arrays.key.shape[2], arrays.value.shape[2:]
    precision = "tf32x3" if how.precision == lax.Precision.HIGHEST else "tf32"
    sizes = length, query_heads, key_heads, value_heads, features, values
    return Plan(*sizes, decay, kept_features, precision)


def _kernels() -> Any:
    """Imported at the first call, as Triton is an optional package."""
    from effattn.triton import recurrence_kernels

    return recurrence_kernels


# The functions of `effattn.pallas.recurrence.by_blocks`


def _states(how: How, arrays: Arrays, state: jax.Array) -> jax.Array:
    return _walked(how, arrays, "walk", (arrays.key, arrays.value, arrays.log_decay, state))


def _gradients_of_states(
    how: How, arrays: Arrays, d_out: jax.Array, d_state: jax.Array
) -> jax.Array:
    read = arrays.query, _scale(arrays), d_out, arrays.log_decay
    return _walked(how, arrays, "walk_back", (*read, d_state))


def _walked(how, arrays, name, operands):
    plan = _plan(how, arrays)
    grid = 1, plan.value_heads, plan.tiles_f * plan.tiles_d
    (states,) = _call(how, plan, name, grid, operands, [_saved(plan)])
    return states


def _read(how: How, arrays: Arrays, states: jax.Array) -> jax.Array:
    plan = _plan(how, arrays)
    shape = plan.length, plan.heads, plan.values
    return _of_blocks(how, plan, "read", _terms(arrays), states, plan.tiles_d, shape, how.dtype)


def _d_query(how: How, arrays: Arrays, states: jax.Array, d_out: jax.Array) -> jax.Array:
    plan = _plan(how, arrays)
    shape = plan.length, plan.heads, plan.features
    operands = d_out, *_terms(arrays)
    return _of_blocks(how, plan, "d_query", operands, states, plan.tiles_f, shape)


def _d_key(how: How, arrays: Arrays, co_states: jax.Array, d_out: jax.Array) -> jax.Array:
    plan = _plan(how, arrays)
    shape = plan.length, plan.value_heads, plan.features
    operands = d_out, *_terms(arrays)
    return _of_blocks(how, plan, "d_key", operands, co_states, plan.tiles_f, shape)


def _d_value(how: How, arrays: Arrays, co_states: jax.Array, d_out: jax.Array) -> jax.Array:
    plan = _plan(how, arrays)
    shape = plan.length, plan.value_heads, plan.values
    operands = d_out, *_terms(arrays)
    return _of_blocks(how, plan, "d_value", operands, co_states, plan.tiles_d, shape)


def _terms(arrays):
    return arrays.query, _scale(arrays), arrays.key, arrays.value, arrays.log_decay


def _scale(arrays):
    """The scale of each example, `(B,)`."""
    if arrays.scale is None:
        return None
    return jnp.broadcast_to(arrays.scale, arrays.query.shape[:1])


def _of_blocks(how, plan, name, operands, states, tiles, shape, dtype=jnp.float32):
    """Runs a kernel of blocks, whose result is `(B, T, heads, size)`."""
    grid = plan.blocks, shape[1], tiles
    (found,) = _call(how, plan, name, grid, (*operands, states), [(shape, dtype)], stages=1)
    return found


# The delta form


def _corrected(how: How, arrays: Arrays, chunks: Chunks, state: jax.Array):
    operands = chunks.recalled, chunks.key, chunks.kept, chunks.value, state
    return _walked_whole(how, arrays, "correct", chunks, operands)


def _corrected_back(how: How, arrays: Arrays, chunks: Chunks, d_state: jax.Array):
    of_keys = chunks.recalled, chunks.key, chunks.kept
    operands = *of_keys, chunks.query, chunks.value, chunks.d_out, d_state
    return _walked_whole(how, arrays, "correct_back", chunks, operands)


def _walked_whole(how, arrays, name, chunks, operands):
    """Returns corrected values `(B, V, n, C, D)`, and states."""
    plan = _plan(how, arrays, chunks.kept.shape[3])
    corrected = (plan.value_heads, plan.blocks, BLOCK, plan.values), jnp.float32
    grid = 1, plan.value_heads, plan.whole_d // plan.narrow
    return tuple(_call(how, plan, name, grid, operands, [corrected, _saved(plan)], stages=1))


def _saved(plan):
    """Shape and dtype of saved states."""
    shape = plan.value_heads, plan.blocks + 1, plan.whole_f, plan.whole_d
    return shape, jnp.float32


def _call(how, plan, name, grid, operands, results, stages=2):
    kernel = getattr(_kernels(), name)
    options = {"warps": plan.warps, "stages": stages, "interpreted": bool(how.interpreted)}
    return launch.call(kernel, plan, grid, operands, results, **options)


KERNELS = recurrence.Kernels(
    **recurrence.by_blocks(_states, _gradients_of_states, _read, _d_query, _d_key, _d_value),
    read=_read,
    d_query=_d_query,
    d_key=_d_key,
    correct=_corrected,
    correct_back=_corrected_back,
)
