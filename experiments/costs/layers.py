"""Layers of every mechanism for one workload, and their compiled passes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn import registry
from effattn.analysis import cost
from effattn.nn import RotaryEmbedding

EXACT = "softmax"
WINDOW = 256
DIRECTIONS = ("causal", "bidirectional")
PASSES = {"forward": "forward", "backward": "forward + backward", "step": "training step"}

# Counting the operations of exact attention takes a second at this length, and a minute at 2**20.
MOST_COUNTED = 2**17
MOST_KEPT = 2**22  # variables of a layer that later passes and lengths take again

# Options by length, in addition to the numbers in `registry.Mechanism.options_at`.
OPTIONS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "longformer": lambda length: {"global_tokens": 16},
    "lsh": lambda length: {"num_rounds": 4, "num_buckets": min(256, max(2, length // 64))},
    # The angles of cosFormer need a maximum length.
    "cosformer": lambda length: {"max_length": max(2**20, length)},
    "block_linformer": lambda length: {"block_size": 8 * math.ceil(math.isqrt(8 * length) / 8)},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Size of a layer, and of the batches that it is measured on.

    Attributes:
      features: width of the layer.
      heads: number of heads.
      precision: "float32" or "bfloat16". Parameters are float32.
      tokens: tokens of a batch, where its sequences are shorter; longer sequences are measured
        one by one.
    """

    features: int = 256
    heads: int = 4
    precision: str = "float32"
    tokens: int = 1

    def sequences(self, length: int) -> int:
        """Returns the number of sequences of a batch."""
        return max(1, self.tokens // length)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.precision).itemsize

    def __str__(self) -> str:
        batch = "batch 1" if self.tokens == 1 else f"batches of {self.tokens:,} tokens"
        return f"{self.features} features, {self.heads} heads, {batch}, {self.precision}"


@dataclasses.dataclass(frozen=True)
class Layer:
    """Layer of a mechanism with its projections.

    Windows have 256 tokens. Options follow the length where the registry's complexity needs it.

    Attributes:
      mechanism: registered name.
      direction: "causal" or "bidirectional".
      length: number of tokens of a sequence.
      workload: size of the layer and of its batches.
      options: further options of the mechanism.
    """

    mechanism: str
    direction: str
    length: int
    workload: Workload = Workload()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def entry(self) -> registry.Mechanism:
        return registry.get(self.mechanism)

    def build(self) -> Any:
        """Returns the mixer, with rotary positions where the mechanism has no positions."""
        entry, is_causal = self.entry, self.direction == "causal"
        given = {"rotary": RotaryEmbedding(), "max_length": self.length}
        options = entry.options_of_model(given)
        if entry.options_at is not None:
            at_length = entry.options_at(self.length).items()
            options |= {name: value for name, value in at_length if isinstance(value, int)}
        if entry.options.get("local_window_size") is not None:
            after = 0 if is_causal else (WINDOW - 1) // 2
            options["local_window_size"] = (WINDOW - 1 - after, after)
        if self.mechanism in OPTIONS:
            options |= OPTIONS[self.mechanism](self.length)
        options |= dict(self.options)
        return entry.build(
            self.workload.features,
            self.workload.heads,
            is_causal=is_causal,
            dtype=self.workload.precision,
            rngs=nnx.Rngs(0),
            **options,
        )

    def parameter_bytes(self) -> int:
        return bytes_of(nnx.state(nnx.eval_shape(self.build)))

    def state_bytes(self) -> int | None:
        """Returns the size of one sequence's decode state; None without decoding."""
        if self.direction != "causal" or "decode" not in self.entry.capabilities:
            return None
        dtype = self.workload.precision
        return bytes_of(jax.eval_shape(lambda: self.build().init_state(1, self.length, dtype)))


def bytes_of(tree: Any) -> int:
    """Returns the bytes of all arrays."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def directions_of(mechanism: str) -> list[str]:
    return [each for each in DIRECTIONS if each in registry.get(mechanism).capabilities]


def _split(mixer: Any) -> Any:
    """Returns the graph, the parameters and all other variables."""
    return nnx.split(mixer, nnx.Param, ...)


_MADE: dict[Any, Any] = {}


def _made(layer: Layer, shapes: Any) -> Any:
    """Returns the layer's parameters and other variables; small ones are made once."""
    leaves = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(shapes))
    key = (layer.mechanism, layer.direction, layer.workload, layer.options, leaves)
    if key in _MADE:
        return _MADE[key]
    made = jax.jit(lambda: _split(layer.build())[1:])()
    if sum(math.prod(shape) for shape, _ in leaves) < MOST_KEPT:
        _MADE[key] = made
    return made


@functools.lru_cache(maxsize=1)
def _drawn(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normally distributed tokens, for all layers of one length."""
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw(shape, dtype=np.float32), dtype)


class Program(NamedTuple):
    """Compiled pass of a layer.

    Attributes:
      start: allocates the arguments, and returns the function that runs the program once.
      operations: arithmetic of the XLA form, from the jaxpr; None beyond `MOST_COUNTED` tokens.
      parameters: number of parameters.
      argument_bytes, temporary_bytes: memory of arguments, and of temporary arrays.
      result_bytes: memory of results, without results that reuse the memory of arguments.
    """

    start: Callable[[], Callable[[], None]]
    operations: int | None
    parameters: int
    argument_bytes: int
    temporary_bytes: int
    result_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.result_bytes

    def sizes(self) -> dict[str, Any]:
        """Returns the counted quantities, for a record."""
        counted = {k: v for k, v in self._asdict().items() if k != "start"}
        return counted | {"needed_bytes": self.needed_bytes}


def compile_pass(layer: Layer, which: str, count: bool = True) -> Program:
    """Compiles a pass of `PASSES` from shapes alone; allocates nothing.

    The gradients are those of parameters and tokens. The training step moves the outputs towards
    the tokens by AdamW, and reuses the memory of parameters and optimiser state.
    """
    graph, params, fixed_shapes = _split(nnx.eval_shape(layer.build))
    workload = layer.workload
    shape = (workload.sequences(layer.length), layer.length, workload.features)
    x = jax.ShapeDtypeStruct(shape, workload.precision)
    optimiser = optax.adamw(1e-3)

    def forward(params, fixed, x):
        return nnx.merge(graph, params, fixed)(x)

    def backward(params, fixed, x):
        out, pull_back = jax.vjp(lambda params, x: forward(params, fixed, x), params, x)
        return out, pull_back(out)

    def step(trained, fixed, x):
        params, moments = trained

        def loss_of(params):
            return jnp.mean(jnp.square(forward(params, fixed, x) - x))

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimiser.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    run = {"forward": forward, "backward": backward, "step": step}[which]
    trained = (params, jax.eval_shape(optimiser.init, params)) if which == "step" else params
    traced = jax.jit(run, donate_argnums=0 if which == "step" else ()).trace(
        trained, fixed_shapes, x
    )
    counted = count and layer.length <= MOST_COUNTED
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # CPUs, GPUs and TPUs report it

    def start():
        made, fixed = _made(layer, (params, fixed_shapes))
        # The training step overwrites its parameters.
        copies = jax.tree.map(jnp.copy, made) if which == "step" else made
        trained = (copies, optimiser.init(copies)) if which == "step" else copies
        arguments = [trained, fixed, _drawn(x.shape, x.dtype)]

        def call():
            results = jax.block_until_ready(compiled(*arguments))
            if which == "step":
                arguments[0] = results[0]

        return call

    return Program(
        start,
        cost.operations(traced.jaxpr) if counted else None,
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )
