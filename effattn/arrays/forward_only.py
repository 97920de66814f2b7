"""Identity primitive with a forward-mode derivative; reverse mode raises a given `TypeError`."""

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

identity = Primitive("effattn_forward_only")
identity.def_abstract_eval(lambda x, *, message: x)
identity.def_impl(lambda x, *, message: x)


def _transposed(cotangent, x, *, message):
    raise TypeError(message)


ad.deflinear2(identity, _transposed)
batching.defvectorized(identity)
mlir.register_lowering(identity, lambda context, x, *, message: [x])
