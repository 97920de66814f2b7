"""Text generation with any model that has `init_state` and `extend`."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.arrays.segments import within
from effattn.decode.sampling import check_draw, divisor, is_number, sample_token
from effattn.decode.state import check_vocabulary, is_concrete, narrow, new_lengths


def generate(
    model: Any,
    prompt: jax.Array,
    *,
    lengths: jax.Array | None = None,
    global_mask: jax.Array | None = None,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    rng: jax.Array | None = None,
    eos_id: int | Sequence[int] | jax.Array | None = None,
) -> jax.Array:
    """Continues each prompt by `max_new_tokens` tokens.

    One call of `extend` reads the prompt except its last token, without computing logits. A loop
    then feeds one token and draws the next one, until all rows have ended. Everything runs in one
    `jax.jit`, compiled once for each model structure and prompt shape. A model that is a pytree
    (every `nnx.Module` is one) is an argument of the jitted function: new parameters do not
    recompile. For any other model object, `jax.jit` uses the attributes at the first call; to
    change such a model, make a new object.

    `effattn.decode.sample_token` draws the tokens; its docstring covers ties, infinite logits and
    tiny temperatures. Nothing else is random: there is no dropout.

    Args:
      model: has `init_state(batch, max_length) -> state` and
        `extend(tokens (B, T), state, *, lengths=None) -> (logits (B, T, V), state)`; `lengths`
        may hold 0, for a prompt of one token in a batch with longer prompts.
      prompt: `(B, P)` int, P >= 1; any value in the padding. The result for traced tokens outside
        the vocabulary depends on the model.
      lengths: `(B,)` int, number of valid tokens of each prompt, right padded, at least 1; default
        all.
      global_mask: `(B, P)` bool, global tokens of the prompt, for a model whose `extend` takes this
        argument, such as one of causal Longformer attention. New tokens are not global.
      max_new_tokens: 0 or more.
      temperature: divides the logits; 0 takes the likeliest token. A traced value must be positive.
      top_k: draw only from the `top_k` likeliest tokens.
      top_p: draw only from the likeliest tokens that together reach this probability.
      rng: a `jax.random` key; required unless `temperature` is 0.
      eos_id: end-of-sequence token, or several `(E,)`. A row that has drawn an end token repeats
        that token until the end.

    Returns:
      `(B, max_new_tokens)` int32, the new tokens only.

    Raises:
      ValueError: an argument is out of its range or missing, or concrete tokens are outside the
        vocabulary.
    """
    given = _checked(
        model, prompt, lengths, global_mask, max_new_tokens, temperature, top_k, top_p, rng, eos_id
    )
    rows = len(given.prompt)
    if 0 in (rows, given.max_new_tokens):
        return jnp.zeros((rows, given.max_new_tokens), jnp.int32)
    leaves, structure = jax.tree.flatten(model)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    statics = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    run = functools.partial(
        _generate,
        statics=statics,
        structure=structure,
        max_new_tokens=given.max_new_tokens,
        top_k=top_k,
    )
    arguments = (
        arrays,
        given.prompt,
        given.lengths,
        given.global_mask,
        None if given.is_greedy else divisor(temperature, jnp.float32),
        None if top_p is None else jnp.asarray(top_p, jnp.float32),
        None if given.is_greedy else rng,
        None if given.ends is None else narrow(given.ends),
    )
    # Tracing finds the vocabulary size; the call below reuses the traced program.
    _, of_vocabulary = _generate.eval_shape(*arguments, **run.keywords)
    (size,) = of_vocabulary.shape[1:]
    valid = within(given.lengths, given.prompt.shape[1])
    check_vocabulary("prompt", given.prompt, valid, size)
    if given.ends is not None:
        check_vocabulary("eos_id", given.ends, None, size)
    return run(*arguments)[0]


class _Checked(NamedTuple):
    """Checked arguments of `generate`; `ends` are those of `eos_id`.

    With `is_greedy`, the likeliest token is taken instead of a drawn one.
    """

    prompt: jax.Array
    lengths: jax.Array
    global_mask: jax.Array | None
    max_new_tokens: int
    ends: jax.Array | None
    is_greedy: bool


def _checked(
    model: Any,
    prompt: Any,
    lengths: Any,
    global_mask: Any,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    rng: Any,
    eos_id: Any,
) -> _Checked:
    missing = [name for name in ("init_state", "extend") if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"model must have init_state and extend, got a {type(model).__name__} without "
            f"{' and '.join(missing)}"
        )
    prompt = checks.as_array("prompt", prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(
            "prompt must be integers of shape (B, P) with P >= 1, "
            f"got {prompt.dtype} of shape {prompt.shape}"
        )
    lengths = new_lengths(lengths, *prompt.shape)
    if is_concrete(lengths) and np.asarray(lengths).min(initial=1) < 1:
        raise ValueError(
            "lengths must be 1 or more, because every row needs at least one prompt token (a start "
            f"token will do), got {np.asarray(lengths).tolist()}"
        )
    if global_mask is not None:
        global_mask = checks.as_array("global_mask", global_mask)
        if global_mask.shape != prompt.shape or global_mask.dtype != bool:
            raise ValueError(
                f"global_mask must be bool of the shape of the prompt, {prompt.shape}, got "
                f"{global_mask.dtype} of shape {global_mask.shape}"
            )
    max_new_tokens = checks.at_least("max_new_tokens", max_new_tokens, 0, "tokens")
    given = {} if top_p is None else {"top_p": top_p}
    for name, number in {"temperature": temperature, **given}.items():
        if np.ndim(number) or not is_number(number):
            raise ValueError(f"{name} must be one number for all rows, got {number!r}")
    ends = None if eos_id is None else _ends(eos_id)
    if is_concrete(temperature) and not 0 <= temperature < np.inf:
        raise ValueError(
            f"temperature must be 0 (greedy), or positive and finite, got {temperature}"
        )
    is_greedy = is_concrete(temperature) and temperature == 0
    if is_greedy and (top_k is not None or top_p is not None):
        raise ValueError(
            "temperature=0 takes the likeliest token and needs top_k=None and top_p=None, got "
            f"top_k={top_k}, top_p={top_p}; leave them out or give a positive temperature"
        )
    if not is_greedy:
        check_draw(rng, temperature, top_k, top_p)
    return _Checked(prompt, lengths, global_mask, max_new_tokens, ends, is_greedy)


def _ends(eos_id: Any) -> jax.Array:
    """Returns the checked end tokens, `()` or `(E,)`."""
    given = eos_id if isinstance(eos_id, jax.Array) else checks.known(eos_id)
    if (
        given is None
        or given.ndim > 1
        or not given.size
        or not jnp.issubdtype(given.dtype, jnp.integer)
    ):
        raise ValueError(
            "eos_id must be an int, the token that ends a row, or one or more of them in a list or "
            f"an array, got {eos_id!r}"
        )
    return checks.as_array("eos_id", eos_id)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


@functools.partial(jax.jit, static_argnames=("statics", "structure", "max_new_tokens", "top_k"))
def _generate(
    arrays,
    prompt,
    lengths,
    global_mask,
    temperature,
    top_p,
    rng,
    ends,
    *,
    statics,
    structure,
    max_new_tokens,
    top_k,
):
    leaves = [s if a is None else a for a, s in zip(arrays, statics, strict=True)]
    model = structure.unflatten(leaves)
    batch, prompt_length = prompt.shape
    # The model never reads the last new token.
    state = model.init_state(batch, prompt_length + max_new_tokens - 1)
    before_last = jnp.maximum(lengths - 1, 0)
    of_prompt, of_last = {}, {}
    if global_mask is not None:
        of_prompt["global_mask"] = global_mask[:, :-1]
        of_last["global_mask"] = jnp.take_along_axis(global_mask, before_last[:, None], axis=1)
    if prompt_length > 1:
        # The logits are unused, so the compiler removes them.
        _, state = model.extend(prompt[:, :-1], state, lengths=before_last, **of_prompt)
    last = jnp.take_along_axis(prompt, before_last[:, None], axis=1)[:, 0]
    sizes = []  # vocabulary sizes, filled while tracing

    def advance(carry, **marks):
        step, token, done, state, tokens = carry
        logits, state = model.extend(token[:, None], state, **marks)
        sizes.append(logits.shape[-1])
        step_rng = None if rng is None else jax.random.fold_in(rng, step)
        drawn = sample_token(
            logits[:, 0], step_rng, temperature=temperature, top_k=top_k, top_p=top_p
        )
        if ends is None:
            token = drawn
        else:
            token = jnp.where(done, token, drawn)
            done = done | (token[:, None] == jnp.atleast_1d(ends)[None]).any(-1)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, step, 0)
        return step + 1, token, done, state, tokens

    def goes_on(carry):
        step, _, done, *_ = carry
        return step < max_new_tokens if ends is None else (step < max_new_tokens) & ~done.all()

    last = narrow(last)
    tokens = jnp.broadcast_to(last, (max_new_tokens, batch))
    carry = (jnp.int32(0), last, jnp.zeros_like(last, bool), state, tokens)
    if prompt_length == 1 or of_last:
        # The first token may change the types in a state, which `while_loop` does not allow. The
        # last token of the prompt may be global.
        carry = advance(carry, **of_last)
    step, token, _, _, tokens = jax.lax.while_loop(goes_on, advance, carry)
    # Ended rows repeat their last token in the skipped steps.
    ended = jnp.arange(max_new_tokens)[:, None] >= step
    # The shape of the empty array carries the vocabulary size.
    return jnp.where(ended, token[None], tokens).T, jnp.zeros((0, sizes[0]), bool)
