"""One layer of a mechanism: its operations, memory, decode state, seconds and code."""

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.analysis import cost
from effattn.nn import RotaryEmbedding
from effattn.registry import Mechanism

# Global tokens of mechanisms that have them: the first tokens of the sequence.
GLOBAL = 16
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Layer:
    """One self-attention layer of a mechanism, for one sequence in float32.

    Attributes:
      entry: the mechanism.
      given: options from the caller.
      heads, head_dim: N and H; the layer has N H features.
      is_causal: direction.
    """

    entry: Mechanism
    given: Mapping[str, Any]
    heads: int
    head_dim: int
    is_causal: bool

    @property
    def features(self) -> int:
        """Number of features per token."""
        return self.heads * self.head_dim

    def options(self, length: int) -> dict[str, Any]:
        """Options of the layer for a length, in addition to those that every layer has.

        The caller's options come first, then sizes that the registry derives from the length.
        """
        entry = self.entry
        options = entry.options_of_model({"max_length": length})
        if "max_length" in entry.options:
            options["max_length"] = length
        if "max_global" in entry.mixer_options():
            options["max_global"] = min(GLOBAL, length)
        at_length = {} if entry.options_at is None else entry.options_at(length)
        sizes = {name: size for name, size in at_length.items() if isinstance(size, int)}
        return {**options, **sizes, **self.given}

    def build(self, length: int) -> Any:
        """Builds the layer with random parameters."""
        given = {"rotary": RotaryEmbedding()} if self.entry.takes_rotary() else {}
        direction = {"is_causal": self.is_causal} if self.entry.mixer_takes("is_causal") else {}
        options = {**given, **direction, **self.options(length)}
        return self.entry.build(self.features, self.heads, rngs=nnx.Rngs(0), **options)

    def operations(self, length: int) -> int:
        """Operations of a forward and a backward pass, extrapolated for long sequences."""

        def counted(n):
            return cost.operations(self._traced(n).jaxpr)

        return round(cost.extrapolated(counted, length, self.entry.time_exponent))

    def state_bytes(self, length: int) -> int:
        """Bytes of the decode state of one sequence."""
        state = jax.eval_shape(lambda: self.build(length).init_state(1, length))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    def compiled(self, length: int, measure: bool) -> tuple[int | None, float | None]:
        """Temporary bytes of a forward and backward pass as compiled for this device, and seconds.

        The seconds are the median of five calls; None without `measure`, and if the layer does not
        fit in the memory.
        """
        program = self._traced(length).lower().compile()
        analysis = program.memory_analysis()
        size = None if analysis is None else analysis.temp_size_in_bytes
        if not measure or (size or 0) > _memory_limit():
            return size, None
        arguments = jax.jit(lambda: nnx.split(self.build(length), nnx.Param, ...)[1:])()
        x = jax.random.normal(jax.random.key(0), (1, length, self.features))
        seconds = []
        try:
            for _ in range(_ROUNDS + 1):  # the first call is slower
                start = time.perf_counter()
                jax.block_until_ready(program(*arguments, x, self._keywords(length)))
                seconds.append(time.perf_counter() - start)
        except jax.errors.JaxRuntimeError:  # out of memory
            return size, None
        return size, statistics.median(seconds[1:])

    def code(self, length: int, decode: bool) -> str:
        """Program that makes the layer, calls it and, with `decode`, takes one step."""
        entry = self.entry
        module, _, attribute = entry.builder.partition(":")
        module = "effattn.nn" if module.startswith("effattn.nn.") else module
        own = {} if entry.takes_heads else dict(entry.options)
        arguments = [f"{name}={option!r}" for name, option in (own | self.options(length)).items()]
        names = {attribute}
        if entry.mixer_takes("is_causal"):
            arguments.insert(0, f"is_causal={self.is_causal}")
        if attribute == "SelfAttention":
            arguments.insert(0, f'attention="{entry.name}"')
        if entry.mixer_takes("num_heads"):
            arguments.insert(0, f"num_heads={self.heads}")
        if entry.takes_rotary():
            arguments.append("rotary=RotaryEmbedding()")
            names.add("RotaryEmbedding")
        lines = [
            "import jax.numpy as jnp",
            "from flax import nnx",
            f"from {module} import {', '.join(sorted(names))}",
            "",
            f"layer = {attribute}(",
            *(f"    {each}," for each in (str(self.features), *arguments, "rngs=nnx.Rngs(0)")),
            ")",
            f"x = jnp.ones((1, {length}, {self.features}))",
        ]
        if "max_global" in self.options(length):
            lines.append(f"y = layer(x, global_mask=jnp.arange({length})[None] < {GLOBAL})")
        else:
            lines.append("y = layer(x)")
        if decode:
            lines += [
                f"state = layer.init_state(batch=1, max_length={length})",
                "y, state = layer.extend(x[:, :1], state)",
            ]
        return "\n".join(lines) + "\n"

    def _traced(self, length: int) -> Any:
        abstract = nnx.eval_shape(lambda: self.build(length))
        split: tuple[Any, ...] = nnx.split(abstract, nnx.Param, ...)
        graph, parameters, others = split

        def both(parameters, others, x, keywords):
            def forward(parameters, x):
                return nnx.merge(graph, parameters, others)(x, **keywords)

            y, pull_back = jax.vjp(forward, parameters, x)
            return y, pull_back(y)

        x = jax.ShapeDtypeStruct((1, length, self.features), jnp.float32)
        return jax.jit(both).trace(parameters, others, x, self._keywords(length))

    def _keywords(self, length: int) -> dict[str, Any]:
        """Arguments of a call of the layer, in addition to the tokens."""
        if "max_global" not in self.options(length):
            return {}
        return {"global_mask": np.arange(length)[None] < GLOBAL}


def _memory_limit() -> float:
    """Half of the memory of a CPU's machine; other devices report that they are out of memory."""
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return float("inf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
