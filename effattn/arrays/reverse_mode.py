"""What to say where custom rules and loops leave no derivative."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def only(mechanism: str, alternative: str) -> Iterator[None]:
    """Turns JAX's refusal of forward mode, raised inside, into a sentence that says what to use.

    A transformation outside `jax.jit` meets the refusal after this call has returned; there JAX's
    own message stands.
    """
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        # The second where what is differentiated forward is to be differentiated again.
        if not any(sign in str(error) for sign in ("forward-mode", "'custom_lin'")):
            raise
        raise TypeError(
            f"{mechanism} has a derivative in reverse mode only (its backward recomputes, and "
            "keeps memory linear): use jax.grad, jax.vjp or jax.jacrev; for a derivative along a "
            f"tangent take jax.jvp of {alternative}"
        ) from error


def forward_only(results: Any, message: str) -> Any:
    """The arrays as they are, but differentiating them in reverse mode is a TypeError."""
    from effattn.arrays.forward_only import identity  # it loads much

    return jax.tree.map(lambda x: identity.bind(x, message=message), results)
