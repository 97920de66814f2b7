"""Text generation with any model that has `init_state` and `extend`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn import _checks
from effattn.decode.sampling import check_draw, is_number, sample_token
from effattn.decode.state import is_concrete, new_lengths


def generate(
    model: Any,
    prompt: jax.Array,
    *,
    lengths: jax.Array | None = None,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    rng: jax.Array | None = None,
    eos_id: int | None = None,
) -> jax.Array:
    """Continues each prompt by `max_new_tokens` tokens.

    The prompt is read in one `extend`, then one token is drawn and fed back at a time, inside one
    `jax.jit` that is compiled once for a model structure and a shape of prompt. A model that is a
    pytree (every `nnx.Module` is) is an argument of it: new parameters do not recompile. Of any
    other object only the attributes at the first call count, so change it by making a new one.

    Args:
      model: has `init_state(batch, max_length) -> state` and
        `extend(tokens (B, T), state, *, lengths=None) -> (logits (B, T, V), state)`.
      prompt: `(B, P)` int, P >= 1.
      lengths: `(B,)` int, how many tokens of `prompt` each row has, right padded, at least 1;
        default all.
      max_new_tokens: at least 1.
      temperature: divides the logits; 0 takes the likeliest token. A traced one must be positive.
      top_k: draw from the `top_k` likeliest tokens only.
      top_p: draw from the likeliest tokens that together reach this probability only.
      rng: a `jax.random` key; needed unless `temperature` is 0.
      eos_id: a token; a row that has drawn it gets nothing else from then on.

    Returns:
      `(B, max_new_tokens)` int32, the new tokens only.

    Raises:
      ValueError: an argument is out of its range or missing; the message says which.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(
            "prompt must be integers of shape (B, P) with P >= 1, "
            f"got {prompt.dtype} of shape {prompt.shape}"
        )
    lengths = new_lengths(lengths, *prompt.shape)
    if is_concrete(lengths) and np.asarray(lengths).min(initial=1) < 1:
        raise ValueError(
            "every row needs at least one prompt token (a start token will do), "
            f"got lengths {np.asarray(lengths).tolist()}"
        )
    max_new_tokens = _checks.at_least("max_new_tokens", max_new_tokens, 1, "tokens")
    optional = {"top_p": top_p, "eos_id": eos_id}
    given = {name: number for name, number in optional.items() if number is not None}
    for name, number in {"temperature": temperature, **given}.items():
        if np.ndim(number) or not is_number(number):
            raise ValueError(f"{name} must be one number for all rows, got {number!r}")
    if eos_id is not None and not jnp.issubdtype(jnp.result_type(eos_id), jnp.integer):
        raise ValueError(f"eos_id must be an int, the token that ends a row, got {eos_id!r}")
    if eos_id is not None and is_concrete(eos_id) and eos_id < 0:
        raise ValueError(f"eos_id must be a token, or None for no end, got {eos_id}")
    if is_concrete(temperature) and not 0 <= temperature < np.inf:
        raise ValueError(
            f"temperature must be 0 (greedy), or positive and finite, got {temperature}"
        )
    greedy = is_concrete(temperature) and temperature == 0
    if greedy and (top_k is not None or top_p is not None):
        raise ValueError(
            "temperature=0 takes the likeliest token, which top_k and top_p cannot change; "
            f"leave them out or give a positive temperature, got top_k={top_k}, top_p={top_p}"
        )
    if not greedy:
        check_draw(rng, temperature, top_k, top_p)
    leaves, structure = jax.tree.flatten(model)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    statics = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return _generate(
        arrays,
        prompt,
        lengths,
        None if greedy else jnp.asarray(temperature, jnp.float32),
        None if top_p is None else jnp.asarray(top_p, jnp.float32),
        None if greedy else rng,
        None if eos_id is None else jnp.asarray(eos_id, jnp.int32),
        statics=statics,
        structure=structure,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


@functools.partial(jax.jit, static_argnames=("statics", "structure", "max_new_tokens", "top_k"))
def _generate(
    arrays,
    prompt,
    lengths,
    temperature,
    top_p,
    rng,
    eos_id,
    *,
    statics,
    structure,
    max_new_tokens,
    top_k,
):
    leaves = [s if a is None else a for a, s in zip(arrays, statics, strict=True)]
    model = structure.unflatten(leaves)
    batch, prompt_length = prompt.shape
    # The last new token is never fed back.
    state = model.init_state(batch, prompt_length + max_new_tokens - 1)
    logits, state = model.extend(prompt, state, lengths=lengths)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]

    def draw(logits, step, done):
        step_rng = None if rng is None else jax.random.fold_in(rng, step)
        token = sample_token(logits, step_rng, temperature=temperature, top_k=top_k, top_p=top_p)
        if eos_id is None:
            return token, done
        token = jnp.where(done, eos_id, token)
        return token, done | (token == eos_id)

    def advance(carry, step):
        token, done, state = carry
        logits, state = model.extend(token[:, None], state)
        token, done = draw(logits[:, 0], step, done)
        return (token, done, state), token

    token, done = draw(last, 0, jnp.zeros((batch,), bool))
    _, rest = jax.lax.scan(advance, (token, done, state), jnp.arange(1, max_new_tokens))
    return jnp.concatenate([token[None], rest]).T
