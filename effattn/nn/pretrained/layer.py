"""Reader of the arrays of one layer of transformers, shared by all loaders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.nn.options import signature_of

Loader = TypeVar("Loader", bound=Callable[..., Any])
# Parameters of a module, and the arrays for them.
Pairs = list[tuple[Any, np.ndarray]]


def loader(function: Loader) -> Loader:
    """The function with a signature that names the options of its group."""
    function.__signature__ = signature_of(function)  # type: ignore[attr-defined]
    return function


class Layer:
    """The arrays of one layer of transformers, by their names after the prefix.

    Args:
      parameters: mapping of names to arrays from NumPy, JAX or torch.
      prefix: the part of the names before those of the layer.
      **dtypes: see `effattn.nn.options.Dtypes`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        prefix: str = "",
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        self.parameters, self.prefix = parameters, prefix
        self.dtypes = {"dtype": dtype, "param_dtype": param_dtype}

    def has(self, name: str) -> bool:
        """Returns whether the layer has an array of this name."""
        return self.prefix + name in self.parameters

    def expect(self, names: Sequence[str], ignored: Iterable[str] = ()) -> None:
        """Raises `ValueError` unless the layer has these names, and no others but `ignored`."""
        wrong = differences(names, _under(self.parameters, self.prefix), ignored)
        if not wrong:
            return
        ends = (name.removesuffix(names[0]) for name in self.parameters if name.endswith(names[0]))
        others = [
            repr(prefix)
            for prefix in ends
            if not differences(names, _under(self.parameters, prefix), ignored)
        ]
        known = f"; such layers are under the prefixes {some(others)}" if others else ""
        raise ValueError(
            f"prefix {self.prefix!r} must lead to the arrays of one layer, {some(sorted(names))}; "
            f"{wrong}{known}"
        )

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of an array that must have `axes` axes."""
        shape = np.shape(self.parameters[self.prefix + name])
        if len(shape) != axes:
            raise ValueError(f"{self.prefix}{name} must have {axes} axes, got the shape {shape}")
        return shape

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """The array of a name, of this shape."""
        return array_of(self.parameters, self.prefix + name, shape)

    def kernel(self, name: str, features_in: int, features_out: int) -> np.ndarray:
        """The kernel `(in, out)` of a linear layer, which torch stores as `(out, in)`."""
        return self(name, features_out, features_in).T

    def taps(self, name: str, features: int, width: int) -> np.ndarray:
        """The taps `(width, D)` of a convolution of each feature, in torch `(D, 1, width)`."""
        return self(name, features, 1, width)[:, 0].T

    def with_bias(self, ours: Any, name: str, features_in: int, features_out: int) -> Pairs:
        """The kernel and the bias of a linear layer, with our parameters for them."""
        return [
            (ours.kernel, self.kernel(f"{name}.weight", features_in, features_out)),
            (ours.bias, self(f"{name}.bias", features_out)),
        ]

    def build(self, mixer: Callable[..., Any], *sizes: Any, **options: Any) -> Any:
        """A module with these options and the dtypes of the call."""
        return mixer(*sizes, **options, **self.dtypes, rngs=nnx.Rngs(0))


def filled(mixer: Any, arrays: Iterable[tuple[Any, np.ndarray]]) -> Any:
    """The module, with its parameters replaced by arrays of the same sizes, in any shape."""
    for parameter, array in arrays:
        value = parameter[...]
        parameter[...] = jnp.asarray(array, value.dtype).reshape(value.shape)
    return mixer


def array_of(parameters: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of a name, in at least float32; `ValueError` if its shape is another one."""
    array = parameters[name]
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        # NumPy has no bfloat16; float32 represents every number of 16 bits exactly.
        array = (array.float() if array.element_size() < 4 else array).numpy()
    array = np.asarray(array)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def check_heads(num_heads: int, features: int) -> None:
    """Raises `ValueError` unless the heads divide the features."""
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"num_heads must divide the layer's {features} features, got {num_heads}; pass "
            "num_attention_heads of the model's config"
        )


def differences(needed: Iterable[str], found: Iterable[str], ignored: Iterable[str] = ()) -> str:
    """The names that are missing and those that are unexpected; empty if there are none."""
    needed, found = set(needed), set(found)
    lists = {"missing": needed - found, "unexpected": found - needed - set(ignored)}
    return "; ".join(f"{which}: {some(sorted(names))}" for which, names in lists.items() if names)


def some(names: list[str], most: int = 14) -> str:
    """The first `most` names, comma-separated."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _under(parameters: Mapping[str, Any], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
