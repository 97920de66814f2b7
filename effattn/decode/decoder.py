"""Base class of decoders."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.decode.state import check_init, check_state, new_lengths


class Sizes(NamedTuple):
    """Checked sizes and dtype of a new decode state."""

    batch: int
    max_length: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: Any

    def heads(self, tokens: int, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
        """Zeros for keys `(B, tokens, K, H)` and values `(B, tokens, K, Hv)`."""
        shape, dtype = (self.batch, tokens, self.key_heads), dtype or self.dtype
        return jnp.zeros((*shape, self.head_dim), dtype), jnp.zeros((*shape, self.value_dim), dtype)

    def length(self) -> jax.Array:
        """Zeros `(B,)`: no row has seen a token."""
        return jnp.zeros((self.batch,), jnp.int32)


def without_naive(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of decoding, with `implementation="xla"` for "naive"."""
    given = options.get("implementation")
    names = (given,) if isinstance(given, str) else tuple(given or ())
    if "naive" not in names:
        return options
    others = names[: names.index("naive")]
    return {**options, "implementation": (*others, "xla")}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Makes and extends the decode state of one attention function.

    A subclass implements `_empty` and `_extend`, which get checked arguments.

    Attributes:
      function: the attention function.
      options: arguments of the function. Naive forms are of whole sequences: in place of
        `implementation="naive"`, decoding runs in XLA.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    _state: ClassVar[type]

    def __post_init__(self):
        object.__setattr__(self, "options", without_naive(self.options))

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
        **per_token: Any,
    ) -> Any:
        """Returns an empty state for `batch` rows of up to `max_length` tokens each.

        `max_length` does not limit a state of constant size. It limits a state that keeps the last
        w tokens only if it is less than w. `per_token` holds one token of the further arrays that
        `extend` gets, `(B, 1, ...)`, or their `jax.ShapeDtypeStruct`.
        """
        dtype = check_init(batch, max_length, dtype)
        self._check_options()
        sizes = Sizes(batch, max_length, num_kv_heads, head_dim, value_dim, dtype)
        return self._empty(sizes, **per_token)

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: Any,
        lengths: jax.Array | None = None,
        **per_token: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Attends from T new tokens to all tokens so far.

        A `score_mod` receives positions in the whole sequence.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.
          **per_token: other arrays of the T tokens, `(B, T, ...)`, by argument name.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: a missing or unknown option, a state of another decoder, or concrete lengths
            that exceed the state. With traced lengths, tokens past the end of the state are not
            stored, and earlier tokens are never overwritten. If `max_length` is less than the
            window, the window is the last `max_length` tokens.
        """
        check_state(state, self._state, query.shape[0])
        lengths = new_lengths(lengths, *query.shape[:2])
        self._check_options()
        return self._extend((query, key, value), state, lengths, **per_token)

    def _empty(self, *args: Any, **per_token: Any) -> Any:
        """`init` for the argument `sizes`, and one token of the arrays `per_token`."""
        raise NotImplementedError

    def _extend(self, *args: Any, **per_token: Any) -> Any:
        """`extend` for `heads` (query, key, value), `state` and `lengths (B,)` int32.

        `lengths` are a NumPy array if the caller gave none, or Python or NumPy integers.
        """
        raise NotImplementedError

    def _check_runs_in_xla(self) -> None:
        """Raises an error if the option `implementation` does not name XLA."""
        name = f"decoding {self.function.__name__}"
        implementation = self.options.get("implementation")
        dispatch.choose(implementation, dispatch.Call(name, {"xla": lambda: None}))

    def _takes(self) -> Collection[str] | None:
        """Names of the options that decoding takes; None if the function checks its options."""
        return None

    def _needs(self) -> tuple[str, ...]:
        """Names of the options that have no default."""
        return ()

    def _check_options(self) -> None:
        name = getattr(self.function, "__name__", repr(self.function))
        given = {name for name, option in self.options.items() if option is not None}
        takes = self._takes()
        unknown = sorted(given - set(given if takes is None else takes))
        if unknown:
            raise ValueError(
                f"decoding {name} does not take {', '.join(unknown)}; its options are "
                f"{', '.join(sorted(takes or ())) or 'none'}"
            )
        missing = [option for option in self._needs() if option not in given]
        if missing:
            raise ValueError(
                f"decoding {name} needs {' and '.join(missing)} among the options, got "
                f"{', '.join(sorted(given)) or 'none'}"
            )

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the options of these names that are given."""
        return {name: self.options[name] for name in names if name in self.options}
