"""Where kernels run: on their own platform, or interpreted wherever one says so."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_interpreted = contextvars.ContextVar("effattn_pallas_interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are traced within run in Pallas's interpreter, on any device, and slowly."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def is_interpreted() -> bool:
    """Whether kernels that are traced now are to be interpreted."""
    return _interpreted.get()


def only_on(platform: str, kernel: Callable[..., Any], name: str, *operands: Any) -> Any:
    """`kernel(*operands)`, compiled for `platform` alone, whichever machine compiles it.

    For another one it is a `NotImplementedError` when the program is lowered.
    """
    if is_interpreted():
        return kernel(*operands)
    shapes = jax.eval_shape(kernel, *operands)
    leaves, structure = jax.tree.flatten(shapes)

    def elsewhere(*operands):
        refused = _refused.bind(
            *jax.tree.leaves(operands),
            shapes=tuple((leaf.shape, leaf.dtype) for leaf in leaves),
            message=f"{name} runs on {platform} alone; implementation='xla' runs anywhere",
        )
        return jax.tree.unflatten(structure, refused)

    return lax.platform_dependent(*operands, **{platform: kernel}, default=elsewhere)


# Stands for what a platform cannot run, until the program is lowered for one.
_refused = Primitive("effattn_refused")
_refused.multiple_results = True


@_refused.def_abstract_eval
def _abstract(*_, shapes, message):
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


@_refused.def_impl
def _evaluation(*_, shapes, message):
    raise NotImplementedError(message)


def _lowering(context, *_, shapes, message):
    raise NotImplementedError(message)


mlir.register_lowering(_refused, _lowering)
