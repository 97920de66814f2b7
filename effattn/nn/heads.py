"""Defaults and checks of the head dimension and the number of key heads."""

from effattn.arrays import checks


def head_size(in_features: int, num_heads: int, head_dim: int | None = None, times: int = 1) -> int:
    """Head dimension: `head_dim`, or by default `times` (1 or 2) D / N, an integer."""
    in_features = times * checks.at_least("in_features", in_features, 1, "features")
    num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
    if head_dim is not None:
        return checks.at_least("head_dim", head_dim, 1, "features")
    if in_features % num_heads:
        what = {1: "in_features", 2: "twice in_features"}[times]
        raise ValueError(
            f"{what} ({in_features}) must be a multiple of num_heads ({num_heads}), or head_dim "
            "must be given"
        )
    return in_features // num_heads


def key_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """Number of key heads K, default N; raises `ValueError` unless K divides N."""
    num_heads = checks.at_least("num_heads", num_heads, 1, "heads")
    if num_kv_heads is None:
        return num_heads
    num_kv_heads = checks.at_least("num_kv_heads", num_kv_heads, 1, "heads, or None")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a positive multiple of num_kv_heads ({num_kv_heads})"
        )
    return num_kv_heads
