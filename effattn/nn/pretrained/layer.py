"""Reader of the arrays of one layer of transformers, shared by all loaders."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.nn.options import signature_of

Loader = TypeVar("Loader", bound=Callable[..., Any])
# Parameters of a module, and the arrays for them.
Pairs = list[tuple[Any, np.ndarray]]
_DTYPES = "float16", "bfloat16", "float32", "float64"


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
        check_mapping(parameters)
        if not isinstance(prefix, str):
            raise ValueError(
                f"prefix must be a str, the start of the names of the arrays, got {prefix!r}"
            )
        self.parameters, self.prefix = parameters, prefix
        self.dtypes = {"dtype": dtype, "param_dtype": param_dtype}

    def has(self, name: str) -> bool:
        """Returns whether the layer has an array of this name."""
        return self.prefix + name in self.parameters

    def expect(self, names: Iterable[str], ignored: Iterable[str] = ()) -> None:
        """Raises `ValueError` unless the layer has these names, and no others but `ignored`."""
        names = list(names)
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
        """The shape of an array that must have `axes` axes, none of them empty."""
        shape = self._shape(name)
        if len(shape) != axes:
            raise self.misshapen(name, f"have {axes} axes")
        if 0 in shape:
            raise self.misshapen(name, "not be empty")
        return shape

    def sizes(self, shapes: Mapping[str, str]) -> dict[str, int]:
        """The sizes of named axes, from arrays and their axes: `{"in_proj.weight": "out in"}`.

        Raises `ValueError` for an array that differs from most arrays in an axis.
        """
        found: dict[str, list[tuple[str, int]]] = {}
        for name, axes in shapes.items():
            for axis, size in zip(axes.split(), self.shape(name, len(axes.split())), strict=True):
                found.setdefault(axis, []).append((name, size))
        usual = {x: Counter(size for _, size in of).most_common(1)[0][0] for x, of in found.items()}
        for axis, of_arrays in found.items():
            like = next(name for name, size in of_arrays if size == usual[axis])
            for name, size in of_arrays:
                if size != usual[axis]:
                    as_other = f"as {self.prefix}{like} of shape {self._shape(like)} has"
                    needs = f"have size {usual[axis]} along its axis {axis!r}, {as_other}"
                    raise self.misshapen(name, needs)
        return usual

    def misshapen(self, name: str, needs: str) -> ValueError:
        """The error for an array of a wrong shape."""
        return ValueError(
            f"{self.prefix}{name} must {needs}, got the shape {self._shape(name)}; take "
            "all arrays, whole, from one model"
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(_weights(self.parameters, self.prefix + name).shape)

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
    """The array of a name, in at least float32; `ValueError` for another shape or no floats."""
    array = _weights(parameters, name)
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        # NumPy has no bfloat16; float32 represents every number of 16 bits exactly.
        array = (array.float() if array.element_size() < 4 else array).numpy()
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def _weights(parameters: Mapping[str, Any], name: str) -> Any:
    """The torch tensor or NumPy array of a name; `ValueError` unless it is of real floats."""
    given = parameters[name]
    array = given if hasattr(given, "detach") else checks.known(given)
    dtype = getattr(given if array is None else array, "dtype", type(given).__name__)
    dtype = getattr(dtype, "name", str(dtype)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be an array of {', '.join(_DTYPES)}, got {dtype}; convert the array, or "
            "take the model's weights before quantisation"
        )
    return array


def check_mapping(parameters: Any) -> None:
    """Raises `ValueError` unless it is a mapping whose names are strings."""
    wrong = type(parameters).__name__
    if isinstance(parameters, Mapping):
        wrong = next((f"the name {n!r}" for n in parameters if not isinstance(n, str)), "")
    if wrong:
        raise ValueError(
            "parameters must be a mapping of names to arrays, such as model.state_dict(), got "
            f"{wrong}"
        )


def is_divisor(value: Any, *numbers: int) -> bool:
    """Returns whether a value is an int, 1 or more, that divides the numbers."""
    return checks.is_integer(value) and value >= 1 and not any(n % value for n in numbers)


def check_heads(num_heads: int, features: int) -> None:
    """Raises `ValueError` unless the heads divide the features."""
    if not is_divisor(num_heads, features):
        raise ValueError(
            f"num_heads must divide the layer's {features} features, got {num_heads!r}; pass "
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
