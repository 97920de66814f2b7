"""Long convolution with learned taps, regularised by a threshold or a moving average."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.axes import lead
from effattn.cores import sequence_parts, token_mixing
from effattn.cores.token_mixing import cleared
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Lengths, Packing, declared
from effattn.xla.long_convolution import long_convolution as convolved


class Options(Direction, Lengths, Packing, total=False):
    """The shared options of `long_convolution`."""


def naive(x, pairs, *, filter, skip, threshold, smoothing):
    """x `(T, D)`, filter `(L, D)` or, in both directions, `(2, L, D)`, skip `(D,)` or None."""
    length, width = filter.shape[-2], 2 * smoothing + 1
    filters = filter if filter.ndim == 3 else jnp.stack([filter, jnp.zeros_like(filter)])
    around = jnp.pad(filters, ((0, 0), (smoothing, smoothing), (0, 0)))
    smooth = sum(around[:, j : j + length] for j in range(width)) / width
    earlier, later = jnp.sign(smooth) * jnp.maximum(jnp.abs(smooth) - threshold, 0)
    distance = (pairs.i[:, None] - pairs.j)[..., None]
    taps = jnp.where(
        distance >= 0,
        earlier[jnp.clip(distance[..., 0], 0)],
        later[jnp.clip(-distance[..., 0] - 1, 0)],
    )
    y = (jnp.where(pairs.allowed[..., None], taps, 0) * x).sum(1)
    return y if skip is None else y + skip * x


@with_naive(over_pairs(naive, heads=False, wide=True))
@sequence_parts.over_channels(("x",), {"filter": -1, "skip": -1})
@jax.named_scope("long_convolution")
@declared
def long_convolution(
    x: jax.Array,
    filter: jax.Array,
    *,
    skip: jax.Array | None = None,
    threshold: float = 0.0,
    smoothing: int = 0,
    **options: Unpack[Options],
) -> jax.Array:
    r"""Convolution with regularised taps as long as the sequence.

    Fu et al. 2023, "Simple Hardware-Efficient Long Convolutions for Sequence Modeling".

    For each feature separately, with the learned taps K, the threshold lambda and a moving average
    over w taps on each side,

        K'_t = (K_(t - w) + ... + K_(t + w)) / (2 w + 1)
        h_t = sign(K'_t) max(|K'_t| - lambda, 0);    y = h * x + d x

    Taps outside of K count as zeros in the average. A bidirectional convolution has two filters,
    for tokens at or before t and for tokens after t. Time is O(T D log T) by Fourier transforms,
    with `segment_ids` O(T D log^2 T); memory is O(T D).

    Args:
      x: `(B, T, D)`.
      filter: K, `(L, D)` if causal, where tap n is for the token at t - n; else `(2, L, D)`, where
        tap n of the second filter is for the token at t + n + 1. L is at least T.
      skip: d, `(D,)`, or None for no skip term.
      threshold: lambda, 0 or more: taps shrink by it, and smaller taps are zero.
      smoothing: w; 0 is no average.
      **options: direction, lengths and packing: see `effattn.options`.

    Returns:
      `(B, T, D)` in the dtype of `x`; convolved in at least float32. Later tokens change earlier
      outputs by rounding errors (`causality="rounding"`).

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a filter shorter than the sequence.
    """
    x, valid, _ = token_mixing.check("long_convolution", {"x": x}, **options)
    _, time, features = x.shape
    is_causal = options.get("is_causal", False)
    taps = regularized(_checked(filter, is_causal, time, features), threshold, smoothing)
    ids = options.get("segment_ids")
    ids = None if ids is None else jnp.asarray(ids)
    earlier, later = (taps, None) if is_causal else (taps[0], taps[1])
    y = convolved(x, earlier, later, ids)
    if skip is not None:
        weight = checks.shaped("skip", skip, (features,)).astype(y.dtype)
        y = y + dtypes.product(lead(weight, 3), x)
    return cleared(y, valid).astype(x.dtype)


def regularized(filter: jax.Array, threshold: float, smoothing: int) -> jax.Array:
    """The taps after the average and the threshold, `(..., L, D)` in at least float32."""
    check_regularization(threshold, smoothing)
    threshold, filter = float(threshold), dtypes.widen(filter)
    if smoothing:
        width, axis = 2 * smoothing + 1, filter.ndim - 2
        window = tuple(width if n == axis else 1 for n in range(filter.ndim))
        ends = tuple((smoothing, smoothing) if n == axis else (0, 0) for n in range(filter.ndim))
        strides = (1,) * filter.ndim
        filter = jax.lax.reduce_window(filter, 0.0, jax.lax.add, window, strides, ends) / width
    return filter - jnp.clip(filter, -threshold, threshold) if threshold else filter


def check_regularization(threshold: Any, smoothing: Any) -> None:
    """Raises `ValueError` unless the threshold is 0 or more and `smoothing` a number of taps."""
    needs = "a number, 0 or more"
    if not checks.real("threshold", threshold, needs) >= 0:
        raise ValueError(f"threshold must be {needs}, got {threshold}")
    checks.at_least("smoothing", smoothing, 0, "taps")


def _checked(filter, is_causal, time, features):
    """The filter; `ValueError` for other shapes and dtypes."""
    shape: tuple[Any, ...] = filter.shape
    before = () if is_causal else (2,)
    fits = len(shape) == 2 + len(before) and (*shape[:-2], shape[-1]) == (*before, features)
    if not fits or shape[-2] < time:
        needed = ", ".join(map(str, (*before, "L", features)))
        direction = "causal" if is_causal else "bidirectional"
        raise ValueError(
            f"filter must have shape ({needed}) in a {direction} call, with L at least the {time} "
            f"tokens, got {shape}"
        )
    return checks.shaped("filter", filter, shape)


registry.register(
    registry.Mechanism(
        name="long_convolution",
        family="attention-free",
        paper="Fu et al. 2023, Simple Hardware-Efficient Long Convolutions for Sequence Modeling",
        function=long_convolution,
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        builder="effattn.nn.long_convolution:LongConvolution",
        complexity="O(N log N D), O(N D) a step",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
