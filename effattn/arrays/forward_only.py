"""Identity with a forward-mode derivative; reverse mode raises a given `TypeError`."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def forward_only(results: Any, message: str) -> Any:
    """Identity whose reverse-mode derivative raises a `TypeError` with the message."""
    return jax.tree.map(lambda x: _identity.bind(x, message=message), results)


_identity = Primitive("effattn_forward_only")
_identity.def_abstract_eval(lambda x, *, message: x)
_identity.def_impl(lambda x, *, message: x)


def _transposed(cotangent, x, *, message):
    raise TypeError(message)


ad.deflinear2(_identity, _transposed)
batching.defvectorized(_identity)
mlir.register_lowering(_identity, lambda context, x, *, message: [x])
