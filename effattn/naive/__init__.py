"""Naive forms: the formula of each mechanism, in a few lines of `jax.numpy` for one head.

`effattn.naive.<name>` is the naive form of the mechanism registered under that name, with the
arguments of its fast function: `effattn.naive.softmax(query, key, value, is_causal=True)`. The same
form runs by `implementation="naive"`. For a mechanism that is a module alone, it takes the module
and its tokens: `effattn.naive.lstm(mixer, x)`.

A naive form is quadratic in time and memory, or steps through the tokens. Forward-mode and
reverse-mode derivatives of any order work. Each formula stands in the file of its mechanism, as the
function `naive`; this package maps it over heads and batch, and applies the shared options. Naive
forms share no arithmetic with the fast forms, except the random bits of dropout, rotary embeddings,
and the mixers inside hybrids. The checks of arguments are those of the fast function.
"""

import functools
from typing import Any

from effattn import registry
from effattn.naive.examples import over_examples
from effattn.naive.form import given_option, with_naive
from effattn.naive.pairs import Pairs, dot, masked_softmax, normalized, over_pairs, projected
from effattn.naive.tokens import over_tokens

__all__ = [
    "Pairs",
    "dot",
    "given_option",
    "masked_softmax",
    "normalized",
    "over_examples",
    "over_pairs",
    "over_tokens",
    "projected",
    "with_naive",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in registry.names():
        raise AttributeError(
            f"no mechanism is registered as {name!r}; registered are {', '.join(registry.names())}"
        )
    entry = registry.get(name)
    if entry.naive is None:
        raise AttributeError(
            f"the mechanism {name!r} has no naive form: decorate its function with "
            "effattn.naive.with_naive, or register it with naive=..."
        )
    is_form_of_function = entry.naive is getattr(entry.function, "naive", None)
    return _checked(entry.function, entry.naive) if is_form_of_function else entry.naive


def _checked(function: Any, naive: Any) -> Any:
    """The naive form, after the checks of the fast function."""

    @functools.wraps(naive)
    def form(*args, **kwargs):
        return function(*args, implementation="naive", **kwargs)

    return form


def __dir__():
    return sorted([*__all__, *(n for n in registry.names() if registry.get(n).naive is not None)])
