"""Errors of approximations on the caller's own queries, keys and values."""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.advice import facts
from effattn.advice.layers import GLOBAL, Layer
from effattn.analysis import approximation_error
from effattn.functional.performer import performer_features
from effattn.functional.softmax import dot_product_attention
from effattn.nn import SelfAttention
from effattn.nn.binding import resolve

Heads = tuple[jax.Array, jax.Array, jax.Array]

_NEEDS = (
    "sample must be (query, key, value), arrays (*B, T, N, H), or (model, batch), a Flax module "
    "with SelfAttention layers and its inputs"
)
_FEATURES = 256  # of Performer, as in its layer


def heads_of(sample: Any) -> list[Heads]:
    """Returns query, key and value of each layer.

    Args:
      sample: `(query, key, value)`, or `(model, batch)`; a batch is an array or a tuple of the
        model's inputs. Queries and keys of a model are read after norms and rotary embedding.

    Raises:
      ValueError: another form, or a model without `SelfAttention` layers.
    """
    parts = tuple(sample) if isinstance(sample, tuple | list) else ()
    if len(parts) == 2 and isinstance(parts[0], nnx.Module):
        return _recorded(*parts)
    if len(parts) != 3 or any(_ndim(part) < 3 for part in parts):
        got = ", ".join(
            str(np.shape(p)) if hasattr(p, "shape") else type(p).__name__ for p in parts
        )
        raise ValueError(f"{_NEEDS}; got {f'({got})' if parts else type(sample).__name__}")
    for name, part in zip(("query", "key", "value"), parts, strict=True):
        dtype = getattr(part, "dtype", None) or np.asarray(part).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"the {name} of sample must have floating-point numbers, got {dtype}")
    query, key, value = map(jnp.asarray, parts)
    jax.eval_shape(dot_product_attention, query, key, value)  # checks the shapes
    return [(query, key, value)]


def error_of(layer: Layer, heads: Sequence[Heads], length: int) -> tuple[float | None, str]:
    """Returns the mean error of the output over layers, examples and heads, and "".

    The mechanism has its options for sequences of `length` tokens, also if the sample has another
    length. For a mechanism without such an error, returns None and the reason.
    """
    entry = layer.entry
    if entry.name == "softmax":
        return 0.0, ""
    if facts.kind(entry) != facts.APPROXIMATE:
        return None, "the mechanism is not an approximation of softmax attention"
    if not entry.takes_heads:
        return None, "the mechanism needs more arrays than query, key and value"
    *batch, tokens, _, size = heads[0][0].shape
    options = layer.options(length)
    function, binding, defaults = resolve(entry.name, {})
    parameters = inspect.signature(function).parameters
    given = {**defaults, **{n: option for n, option in options.items() if n in parameters}}
    if "rng" in parameters:
        given.setdefault("rng", jax.random.key(0))
    if "global_mask" in parameters:
        given["max_global"] = min(GLOBAL, tokens)
        given["global_mask"] = jnp.broadcast_to(jnp.arange(tokens) < GLOBAL, (*batch, tokens))
    if entry.name == "performer":
        count = options.get("num_features", _FEATURES)
        given["projection"] = performer_features(jax.random.key(0), count, size)
    learned = sorted(binding.required - given.keys())
    if learned:
        return None, f"the mechanism has to be trained first: it learns {' and '.join(learned)}"
    given["is_causal"] = layer.is_causal
    try:
        errors = [approximation_error(entry.name, *each, **given).output.mean() for each in heads]
    except ValueError as error:
        return None, str(error)
    mean = float(sum(errors)) / len(errors)
    if not math.isfinite(mean):  # NaN has no place in an order
        return None, "the sample is empty, or has values that are not finite"
    return mean, ""


def _ndim(part: Any) -> int:
    try:
        return np.ndim(part)
    except ValueError:  # lists of different lengths
        return 0


def _recorded(model: nnx.Module, batch: Any) -> list[Heads]:
    """Runs the model and returns what each of its `SelfAttention` layers passes to attention."""
    inputs = batch if isinstance(batch, tuple | list) else (batch,)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state):
        copy: Any = nnx.merge(graph, state)
        if dataclasses.is_dataclass(getattr(copy, "config", None)) and copy.config.remat:
            # Rematerialisation changes no value, but its tracers must not leave the inner function.
            copy.config = dataclasses.replace(copy.config, remat=False, remat_policy=None)
        seen: list[Heads] = []

        def recording(attention):
            def attend(*arrays, **keywords):
                if len(arrays) == 3:  # mechanisms with shared queries and keys pass two
                    seen.append(arrays)
                return attention(*arrays, **keywords)

            return attend

        for _, module in nnx.iter_modules(copy):
            if isinstance(module, SelfAttention):
                module.attention = recording(module.attention)
        copy(*map(jnp.asarray, inputs))
        return seen

    found = run(state)
    if not found:
        raise ValueError(f"{_NEEDS}; got a {type(model).__name__} without such layers")
    return found
