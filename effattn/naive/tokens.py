"""Naive forms token by token: the recurrence of one head."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.naive import lifting


def over_tokens(
    naive: Callable[..., Any],
    *,
    per_token: Sequence[str] = (),
    per_query: Sequence[str] = (),
    per_head: Mapping[str, int] | None = None,
    heads: bool = True,
    empty: Callable[..., Any] | None = None,
    made_by_head: Callable[..., Mapping[str, Any]] | None = None,
    neutral: Mapping[str, float] | None = None,
) -> Callable[..., Any]:
    """The naive form of all tokens, heads and examples, with the arguments of the fast function.

    A padded token changes no state and gives zeros; the first token of a packed document begins
    with the empty state. All inputs are computed in at least float32.

    Args:
      naive: `naive(state, query, key, value, **own)` of one token of one head: state `(H, Hv)`,
        query and key `(H,)`, value `(Hv,)`. Returns the new state and the output `(Hv,)`. The
        inputs after `state` may have other names; the last one gives the output its dtype.
        `naive` receives `scale` if it names it.
      per_token: names of own arguments `(*B, T, K, ...)`.
      per_query: names of own arguments `(*B, T, N, ...)` that are padded like the queries.
      per_head: own arguments `(K, ...)` or `(N, ...)`, with the number of axes of one head; an
        array of that many axes is for all heads.
      heads: False if the inputs have no axis of heads.
      empty: `(**arrays of one token, as zeros, **own arguments of one head) -> state`; the default
        is zeros `(H, Hv)`.
      made_by_head: `(**given) -> arguments by name`: the arrays of `per_head`, for all heads, that
        the function makes if the caller gives none. It reads shapes and dtypes of the inputs alone.
      neutral: the own arguments by which a token of zeros would change the state, with values by
        which a token of zeros does not.
    """
    parameters = inspect.signature(naive).parameters.values()
    inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    ranks = dict(per_head or {})
    of_queries = {inputs[0], *per_query}

    def zeros(key, value, **_):
        return jnp.zeros((key.size, value.size), value.dtype)

    @functools.partial(lifting.named, like=naive)
    def call(**given: Any) -> Any:
        if made_by_head is not None:
            given |= made_by_head(**given)
        arrays = [jnp.asarray(given[name]) for name in inputs]
        last = arrays[-1]
        axis = -3 if heads else -2
        shape, length = last.shape[:axis], last.shape[axis]
        num_heads = max(x.shape[-2] for x in arrays) if heads else None
        static = {name: given[name] for name in own if name in given}
        if "scale" in own and static.get("scale") is None:
            static["scale"] = arrays[0].shape[-1] ** -0.5
        tokens = dict(zip(inputs, arrays, strict=True))
        given_names = [n for n in (*per_token, *per_query) if static.get(n) is not None]
        tokens |= {n: jnp.asarray(static.pop(n)) for n in given_names}
        shared = {n: lifting.per_head_array(static.pop(n, None), r) for n, r in ranks.items()}

        def one(*, ids, query_length=None, key_length=None, initial_state=None, **mapped):
            valid = lifting.present_tokens(ids, query_length)
            present = lifting.present_tokens(ids, key_length)
            of_tokens = {name: mapped.pop(name) for name in tokens}
            for name, x in of_tokens.items():
                of_tokens[name] = lifting.without_padding(
                    lifting.widened(x, *arrays), valid if name in of_queries else present
                )
            own_arrays = lifting.widened({**static, **mapped}, *arrays)
            no_token = {n: jnp.zeros_like(x, shape=x.shape[1:]) for n, x in of_tokens.items()}
            first = (empty or zeros)(**no_token, **own_arrays)
            start = first if initial_state is None else initial_state
            start = jax.tree.map(lambda x, like: x.astype(like.dtype), start, first)

            def step(carry, token):
                state, document = carry
                of_token, ident, is_present = token
                before = _choose(ident == document, state, first)
                of_inputs = [of_token.pop(name) for name in inputs]
                own_arguments = {**own_arrays, **of_token}
                for name, x in (neutral or {}).items():
                    own_arguments[name] = jnp.where(is_present, own_arguments[name], x)
                after, out = naive(before, *of_inputs, **own_arguments)
                carry = _choose(is_present, (after, ident), (state, document))
                return carry, out

            document = ids[jnp.argmax(ids != 0)] if length else jnp.zeros((), ids.dtype)
            (state, _), out = lax.scan(step, (start, document), (of_tokens, ids, present))
            return lifting.without_padding(out, valid).astype(last.dtype), state

        of_examples = lifting.example_arguments(given, shape, length, length)
        state = {"initial_state": given.get("initial_state")}
        with lifting.precision(given.get("precision")):
            out, state = lifting.over_heads(
                one,
                len(shape),
                num_heads,
                tokens=tokens,
                heads=shared,
                examples={
                    "ids": of_examples["key_ids"],
                    "query_length": of_examples["query_lengths"],
                    "key_length": of_examples["key_lengths"],
                },
                both=state,
                out_axes=(1, 0),
            )
        if heads:
            state = lifting.first_of_groups(state, len(shape), last.shape[-2])
        return (out, state) if given.get("return_state") else out

    of_call: Any = call
    of_call.per_token, of_call.per_head = (*per_token, *per_query), ranks
    of_call.per_query, of_call.made_by_head = tuple(per_query), made_by_head
    return call


def _choose(condition, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
