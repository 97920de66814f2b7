"""Identity with a forward-mode derivative; reverse mode raises a given `TypeError`."""

import functools
from typing import Any

import jax


def forward_only(results: Any, message: str) -> Any:
    """Identity whose reverse-mode derivative raises a `TypeError` with the message."""
    return jax.tree.map(lambda x: _identity().bind(x, message=message), results)


@functools.cache
def _identity() -> Any:
    from jax.extend.core import Primitive  # imported on first use: a slow import
    from jax.interpreters import ad, batching, mlir

    identity = Primitive("effattn_forward_only")
    identity.def_abstract_eval(lambda x, *, message: x)
    identity.def_impl(lambda x, *, message: x)

    def transposed(cotangent, x, *, message):
        raise TypeError(message)

    ad.deflinear2(identity, transposed)
    batching.defvectorized(identity)
    mlir.register_lowering(identity, lambda context, x, *, message: [x])
    return identity
