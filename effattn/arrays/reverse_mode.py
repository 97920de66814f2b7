"""Error messages for derivatives that custom VJPs and loops do not support."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def only(mechanism: str, alternative: str) -> Iterator[None]:
    """Replaces JAX's error for forward mode, raised within, by one that names an alternative.

    A transformation outside `jax.jit` raises JAX's error after this context has ended, so JAX's
    message stays.
    """
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        # JAX names 'custom_lin' if the forward-mode derivative is differentiated again.
        if not any(sign in str(error) for sign in ("forward-mode", "'custom_lin'")):
            raise
        raise TypeError(
            f"{mechanism} has a derivative in reverse mode only (its custom backward pass saves "
            "memory): use jax.grad, jax.vjp or jax.jacrev; for a derivative along a tangent use "
            f"jax.jvp of {alternative}"
        ) from error


def forward_only(results: Any, message: str) -> Any:
    """Identity whose reverse-mode derivative raises a `TypeError` with the message."""
    from effattn.arrays.forward_only import identity  # imported on first use: a slow import

    return jax.tree.map(lambda x: identity.bind(x, message=message), results)
