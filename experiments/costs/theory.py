"""Costs in theory: the classical tables, and the laws that measurements are compared with."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from effattn import registry
from effattn.analysis import cost
from experiments.costs.layers import bytes_of


class Steps(NamedTuple):
    """Columns of table 1 of Vaswani et al. 2017 for a family.

    Attributes:
      sequential: operations that must follow each other in a training pass.
      path: longest path between two tokens through one layer or a stack of layers.
    """

    sequential: str
    path: str


STEPS: Mapping[str, Steps] = {
    "exact": Steps("O(1)", "O(1)"),
    "sparse": Steps("O(1)", "O(N / w), with global tokens O(1)"),
    "linear": Steps("O(1), causal O(N / c)", "O(1)"),
    "recurrent": Steps("O(N / c)", "O(N)"),
    "state space": Steps("O(1), by a scan O(log N)", "O(N)"),
    "low rank": Steps("O(1)", "O(1)"),
    "clustered": Steps("O(1)", "O(1) within a cluster"),
    "attention-free": Steps("O(1), causal O(N / c)", "O(1)"),
    "synthetic": Steps("O(1)", "O(1)"),
    "hybrid": Steps("maximum over its parts", "minimum over its parts"),
    "baseline": Steps("O(N), convolution O(1)", "O(N), convolution O(N / w)"),
}


def complexities(mechanisms: Sequence[str]) -> list[list[str]]:
    """Returns rows (family, complexity, mechanisms, sequential operations, path length)."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in mechanisms:
        entry = registry.get(name)
        groups.setdefault((entry.family, entry.complexity), []).append(name)
    order = list(dict.fromkeys(family for family, _ in groups))
    unknown = Steps("-", "-")
    return [
        [family, complexity, ", ".join(names), *steps]
        for (family, complexity), names in sorted(
            groups.items(), key=lambda g: order.index(g[0][0])
        )
        for steps in [STEPS.get(family, unknown)]
    ]


def matrix_bytes(length: int, itemsize: int) -> int:
    """Returns the bytes of an attention matrix of one head."""
    return itemsize * length**2


class Optimiser(NamedTuple):
    """Optimiser and its bytes per parameter in theory.

    Attributes:
      make: optimiser of Optax.
      weights, gradients: bytes of a weight (with its float32 copy, if any) and of its gradient.
      state: bytes of the optimiser state; a word if it depends on the shapes.
    """

    make: optax.GradientTransformation
    weights: int
    gradients: int
    state: int | str


def optimisers() -> Mapping[str, Optimiser]:
    """Returns optimisers by name; all but one keep weights in float32."""
    return {
        "SGD": Optimiser(optax.sgd(1.0), 4, 4, 0),
        "SGD with momentum": Optimiser(optax.sgd(1.0, momentum=0.9), 4, 4, 4),
        "Lion": Optimiser(optax.lion(1.0), 4, 4, 4),
        "Muon": Optimiser(optax.contrib.muon(1.0), 4, 4, 4),
        "Adafactor": Optimiser(optax.adafactor(1.0), 4, 4, "rows + columns"),
        "AdamW": Optimiser(optax.adamw(1.0), 4, 4, 8),
        "AdamW, bfloat16 with float32 copy": Optimiser(optax.adamw(1.0), 2 + 4, 2, 8),
    }


def state_bytes(make: optax.GradientTransformation, side: int = 1024) -> float:
    """Returns the measured bytes of optimiser state per parameter, for a square matrix."""
    weights = {"kernel": jax.ShapeDtypeStruct((side, side), jnp.float32)}
    return bytes_of(jax.eval_shape(make.init, weights)) / side**2


def io_bound(length: int, head_size: int, heads: int, fast_bytes: int, itemsize: int = 4) -> float:
    """Returns the bytes that exact attention must move, N^2 H^2 / M entries a head.

    Dao et al. 2022 ("FlashAttention") show that no algorithm for exact attention moves fewer for
    all M from H to N H, up to a constant factor; inputs and results are moved at least once.

    Args:
      length: N.
      head_size: H.
      heads: number of heads.
      fast_bytes: size of the fast memory, M entries.
      itemsize: bytes of an entry.
    """
    entries = fast_bytes / itemsize
    moved = max(length**2 * head_size**2 / entries, 4 * length * head_size)
    return itemsize * heads * moved


def crossover(
    lengths: Sequence[int], ours: Sequence[float], exact: Sequence[float]
) -> float | None:
    """Returns the length from which on the cost is below that of exact attention.

    Between two lengths the logarithm of the ratio is interpolated. The first length means: below
    at all lengths.

    Returns:
      The length, or None if the cost at the last length is not below.
    """
    ratios = [math.log(own / reference) for own, reference in zip(ours, exact, strict=True)]
    if not ratios or ratios[-1] >= 0:
        return None
    above = [index for index, ratio in enumerate(ratios) if ratio >= 0]
    if not above:
        return float(lengths[0])
    low, high = above[-1], above[-1] + 1
    share = ratios[low] / (ratios[low] - ratios[high])
    return float(lengths[low] * (lengths[high] / lengths[low]) ** share)


def growth(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """Returns the exponent of the length, by least squares over the upper half of the lengths."""
    used = max(2, math.ceil(len(lengths) / 2))
    return cost.exponent(lengths[-used:], values[-used:]) if len(lengths) > 1 else None
