"""What to say where a custom rule leaves no forward-mode derivative."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def only(mechanism: str, alternative: str) -> Iterator[None]:
    """Turns JAX's refusal of forward mode, raised inside, into a sentence that says what to use.

    A transformation outside `jax.jit` meets the refusal after this call has returned; there JAX's
    own message stands.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"{mechanism} has a derivative in reverse mode only (its backward recomputes, and "
            "keeps memory linear): use jax.grad, jax.vjp or jax.jacrev; for a derivative along a "
            f"tangent take jax.jvp of {alternative}"
        ) from error
