"""How a module's features and key heads divide among its heads."""


def default_head_dim(in_features: int, num_heads: int) -> int:
    """D / N."""
    if num_heads < 1 or in_features % num_heads:
        raise ValueError(
            f"in_features ({in_features}) must be a multiple of num_heads ({num_heads}) "
            "when head_dim is not given"
        )
    return in_features // num_heads


def key_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """K, which is N if it is not given; `ValueError` unless it divides N."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a positive multiple of num_kv_heads ({num_kv_heads})"
        )
    return num_kv_heads
