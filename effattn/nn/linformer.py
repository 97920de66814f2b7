"""Self-attention of Linformer, with the sequence projections as parameters."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.functional.linformer import window_projection
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

SHARING = ("none", "heads", "key_value", "layers")
METHODS = ("linear", "convolution", "mean")


class LinformerSelfAttention(SelfAttention):
    """Bidirectional mixer with projected keys and values (Wang et al. 2020, "Linformer").

        q, k, v = x Wq, x Wk, x Wv;   y = linformer_attention(q, k, v, E, F) Wo

    E and F project the L = `max_length` tokens to r = `num_projected` rows. `method` selects the
    form of the projection:

        linear        a learned (r, L) matrix
        convolution   windows of L / r tokens, with L / r learned weights shared by all windows
        mean          means of such windows

    `sharing` selects how heads share the parameters, as in the paper:

        none          E and F for each key head
        heads         E and F for all heads
        key_value     E = F for all heads
        layers        E = F for all heads of all layers, an `nnx.Param` passed to each layer

    Args:
      max_length: L, maximum number of input tokens.
      num_projected: r, number of projected rows.
      method: see above.
      sharing: see above; has no effect for `method="mean"`, which has no parameters.
      projection: with `sharing="layers"`, the parameter shared by all layers: `(r, L)` for
        "linear", `(L / r,)` for "convolution". Flax transformations (`nnx.grad`, `nnx.jit`, ...)
        and `nnx.split` count the shared parameter once.
      is_causal: must be False.
      **options: as in `SelfAttention`, and options of `effattn.linformer_attention`.

    Raises:
      ValueError: as `SelfAttention`; also for `is_causal=True` and an unsuitable `projection`; in
        calls, for more than L tokens.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        max_length: int = 512,
        num_projected: int = 128,
        method: str = "linear",
        sharing: str = "heads",
        projection: nnx.Param | None = None,
        is_causal: bool = False,
        **options: SelfAttentionOptions,
    ):
        made = "key_projection", "value_projection"
        refuse(type(self), options, made, "it makes the projections from method and sharing")
        super().__init__(in_features, num_heads, "linformer", is_causal=is_causal, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        self.num_projected = checks.at_least("num_projected", num_projected, 1, "rows")
        checks.one_of("method", method, METHODS)
        checks.one_of("sharing", sharing, SHARING)
        if self.num_projected > self.max_length:
            raise ValueError(
                f"num_projected must be at most max_length {max_length}, got {num_projected}"
            )
        if method != "linear" and max_length % num_projected:
            raise ValueError(
                f"max_length must be a multiple of num_projected {num_projected} for "
                f"method={method!r}, got {max_length}"
            )
        self.method = method
        self.sharing = sharing
        windows = self.max_length // self.num_projected
        shape = (self.num_projected, self.max_length) if method == "linear" else (windows,)
        _check_given(projection, sharing, method, shape)
        if sharing == "none":
            shape = (self.num_kv_heads, *shape)
        # Without padding, projected rows have the variance of a token.
        init, make = nnx.initializers.normal(shape[-1] ** -0.5), Layers(**options)

        def drawn() -> nnx.Param | None:
            return None if method == "mean" else make.drawn(init, *shape)

        self.key_projection = drawn() if projection is None else projection
        self.value_projection = drawn() if sharing in ("none", "heads") else None

    def _options(self) -> dict[str, Any]:
        of_keys = self._matrix(self.key_projection)
        shared = self.value_projection is None
        of_values = of_keys if shared else self._matrix(self.value_projection)
        projections = {"key_projection": of_keys, "value_projection": of_values}
        return {**super()._options(), **projections}

    def _matrix(self, weights: nnx.Param | None) -> Any:
        """E or F, `(r, L)` or `(K, r, L)`, in the computation dtype."""
        if weights is None:
            width = self.max_length // self.num_projected
            array = jnp.full(width, 1 / width, self.param_dtype)
        else:
            array = weights[...]
        if self.dtype is not None:
            array = array.astype(self.dtype)
        return array if self.method == "linear" else window_projection(array, self.num_projected)


def _check_given(projection: Any, sharing: str, method: str, shape: tuple[int, ...]) -> None:
    if method == "mean":
        if projection is not None:
            raise ValueError(
                f"method='mean' takes no projection, got a {type(projection).__name__}; leave "
                "projection out"
            )
        return
    if (projection is None) == (sharing == "layers"):
        raise ValueError(
            "projection, one nnx.Param for all layers, must be given with sharing='layers', and "
            f"only then, got sharing={sharing!r} and "
            f"{'no' if projection is None else 'a'} projection"
        )
    if projection is not None and (
        not isinstance(projection, nnx.Variable) or projection[...].shape != shape
    ):
        got = getattr(projection, "shape", type(projection).__name__)
        raise ValueError(f"projection must be an nnx.Param of shape {shape}, got {got}")
