"""Adapter of mechanisms to the attention layers of Flax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from effattn.nn.array_options import check_has_none
from effattn.nn.binding import Binding, bind
from effattn.nn.dropout import check_dropout_rate


def as_attention_fn(
    mechanism: str | Callable[..., jax.Array] = "softmax",
    *,
    is_causal: bool = False,
    **options: Any,
) -> Callable[..., jax.Array]:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadAttention`.

        nnx.MultiHeadAttention(8, 512, attention_fn=as_attention_fn("linear"), decode=False, ...)

    The returned function has the parameters of `flax.nnx.dot_product_attention`. It honours every
    argument or raises:

    - A `mask` of shape `(*B, 1, 1, S)` is read as padding of the keys, for any pattern. Other masks
      require a mechanism that takes masks. A row without keys gives zeros.
    - One query and several keys under a padding mask, or a mask `(*B, N, 1, S)` per head, is a
      decoding step of the Flax layers (`decode=True`). The query then has the position of the last
      valid key, for windows and `score_mod`. Decoding needs the capability "cross"; with
      `local_window_size`, also "offset".
    - `is_causal` is also an option of this adapter, since Linen's layer does not pass `is_causal`.
      Prefer `is_causal=True` to a causal mask.
    - Dropout is drawn separately for each weight; set `broadcast_dropout=False` in the layer.
    - `module` (`sow_weights=True`) raises, since no mechanism forms the matrix of weights.

    The softmax is always at least float32 (Linen's `force_fp32_for_softmax`).

    Args:
      mechanism: a registered name, a registered function, a `functools.partial` of a function, or
        any function of query, key and value.
      is_causal: query t attends to keys 0 to t only.
      **options: arguments of the mechanism, such as `local_window_size`. Arrays are constants;
        parameters raise, since Flax's layers would not train them.

    Raises:
      ValueError: here for an unknown name or option; in the returned function for an argument that
        the mechanism does not support.
    """
    function, binding, options = bind(mechanism, options)
    check_has_none("an attention_fn", function, options)
    if is_causal:
        binding.require("causal", "is_causal=True")
    always_causal = is_causal

    def attention_fn(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Callable[..., Any] = flax_promote_dtype,
        is_causal: bool = False,
    ) -> jax.Array:
        if module is not None:
            raise ValueError(
                f"attention {binding.name!r} never forms the attention weights that module would "
                "sow; leave out module, or give the layer sow_weights=False"
            )
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        keywords = {
            **options,
            **_dropout_keywords(
                binding, dropout_rate, dropout_rng, deterministic, broadcast_dropout
            ),
        }
        if precision is not None:
            if not binding.takes("precision"):
                raise ValueError(
                    f"attention {binding.name!r} takes no precision, got {precision}; leave it out"
                )
            keywords["precision"] = precision
        if bias is not None:
            binding.require("bias", "bias")
            keywords["bias"] = bias
        is_causal = is_causal or always_causal
        decoding = False
        if mask is not None:
            of_mask, decoding = _mask_keywords(binding, options, mask, query, key, is_causal)
            keywords.update(of_mask)
        # In a decoding step the query attends to every valid key, causal or not.
        if is_causal and not decoding:
            binding.require("causal", "is_causal=True")
            if binding.takes("is_causal"):
                keywords["is_causal"] = True
        elif not decoding:
            binding.require("bidirectional", "is_causal=False")
        binding.check_complete(keywords)
        return function(query, key, value, **keywords)

    return attention_fn


def _dropout_keywords(
    binding: Binding,
    rate: float,
    rng: jax.Array | None,
    deterministic: bool,
    broadcast: bool,
) -> dict[str, Any]:
    check_dropout_rate(rate)
    if deterministic or rate == 0.0:
        return {}
    binding.require("dropout", f"dropout_rate={rate}")
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate} needs dropout_rng, a jax.random key, got None; without dropout, "
            "pass deterministic=True"
        )
    if broadcast:
        raise ValueError(
            "broadcast_dropout must be False, as dropout is drawn separately for every example and "
            "head, got True; pass broadcast_dropout=False"
        )
    return {"dropout_rate": rate, "dropout_rng": rng}


def _mask_keywords(
    binding: Binding,
    options: dict[str, Any],
    mask: jax.Array,
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
) -> tuple[dict[str, Any], bool]:
    """Keyword arguments for a mask `(*#B, #N, #T, S)`, and whether the call is a decoding step."""
    mask = _as_boolean(mask, query.ndim)
    of_keys = mask.shape[-2:] == (1, key.shape[-3])
    padding = of_keys and mask.shape[-3] == 1
    if not padding:
        binding.require(
            "mask",
            f"a mask of shape {mask.shape} (for a causal mask pass is_causal=True; only a mask of "
            "shape (*B, 1, 1, S) is padding)",
        )
    decoding = of_keys and query.shape[-3] == 1 and key.shape[-3] > 1
    if decoding:
        what = f"one query and {key.shape[-3]} keys (decode=True)"
        binding.require("cross", what)
        if options.get("local_window_size") is not None:
            binding.require("offset", f"local_window_size with {what}")
    if padding or decoding:
        return _key_mask_keywords(binding, mask, query, key, is_causal, decoding), decoding
    return {"mask": mask}, False


def _as_boolean(mask: jax.Array, ndim: int) -> jax.Array:
    """Converts a Flax mask, which may be float and lack batch axes, to bool with `ndim` axes."""
    mask = jnp.asarray(mask).astype(bool)
    return mask.reshape((1,) * (ndim - mask.ndim) + mask.shape)


def _key_mask_keywords(
    binding: Binding,
    mask: jax.Array,
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    decoding: bool,
) -> dict[str, Any]:
    """Keyword arguments for a mask `(*#B, #N, 1, S)` over the keys."""
    keywords: dict[str, Any] = {}
    batch = key.shape[:-3]
    valid = jnp.broadcast_to(mask.any((-3, -2)), (*batch, key.shape[-3]))
    if binding.has("mask"):
        keywords["mask"] = mask
    else:
        binding.require("segments", "a padding mask")
        ids = valid.astype(jnp.int32)
        # Without an offset, a causal mechanism is a recurrence: query t and key t are one token.
        one_sequence = is_causal and not decoding and not binding.has("offset")
        query_ids = jnp.ones((*batch, query.shape[-3]), jnp.int32)
        keywords["segment_ids"] = ids if one_sequence else (query_ids, ids)
    last = (key.shape[-3] - 1 - jnp.argmax(valid[..., ::-1], axis=-1)).astype(jnp.int32)
    if decoding and binding.has("offset"):
        keywords["query_offset"] = last
    elif binding.places_tokens:
        # Positions derived from segment ids would restart after each hole in the mask.
        of_queries = last[..., None] if decoding else jnp.arange(query.shape[-3])
        keywords["positions"] = tuple(
            jnp.broadcast_to(positions, (*batch, length))
            for positions, length in (
                (of_queries, query.shape[-3]),
                (jnp.arange(key.shape[-3]), key.shape[-3]),
            )
        )
    return keywords
