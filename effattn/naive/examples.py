"""Naive forms of the tokens of one example."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


def over_examples(naive: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a naive form of one example over all examples, x `(*B, T, D)`.

    Args:
      naive: takes the tokens `x (T, D)` of one example and returns `(T, D)`: `naive(mixer, x)` for
        a mechanism that is a module alone. The other arguments are the same for all examples.
    """
    signature = inspect.signature(naive)

    @functools.wraps(naive)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        x = given.pop("x")
        return jnp.vectorize(lambda x: naive(x=x, **given), signature="(t,d)->(t,d)")(x)

    return call
