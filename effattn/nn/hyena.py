"""Hyena mixer."""

import dataclasses
import itertools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from
from effattn.decode.state import check_capacity, new_lengths
from effattn.decode.tokens import stored
from effattn.functional.hyena import gated, hyena_convolution
from effattn.nn.layers import Layers
from effattn.nn.mixer import CausalMixer
from effattn.nn.options import Projected
from effattn.xla.long_convolution import long_convolution_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HyenaState:
    """Decode state of a `Hyena`.

    Attributes:
      inputs: inputs `(B, S, D)` of each of the N convolutions; slots without a token are zero.
      last: the last inputs of the short convolution.
      length: `(B,)` int32, number of tokens read.
    """

    inputs: tuple[jax.Array, ...]
    last: jax.Array
    length: jax.Array


class Hyena(CausalMixer):
    """Hyena operator (Poli et al. 2023, "Hyena Hierarchy", section 3).

        x^1, ..., x^N, v = convolution(x W_in)
        y = hyena_convolution(x, v, h, d) W_out

    Filters are functions of the position: a small network with sine activations maps the position
    and K harmonics of the position to taps, which the window exp(-a t) multiplies. The rates `a`
    range from fast to slow along the features. Time is O(N T D log T), with packed documents
    O(N T D log^2 T). The decode state caches the inputs of the N convolutions. A step costs
    O(N S D), and a call O(L F (F + N D)) for the taps at all L = `max_length` positions, with
    F = `filter_features`.

    Args:
      max_length: maximum number of tokens per row; the filter network reads position / max_length.
      order: N, number of gates and convolutions.
      num_harmonics: K, number of harmonics (sine and cosine pairs) of the position.
      filter_features: hidden size of the filter network, which has two hidden layers.
      frequency: initial factor on the argument of the sine activations.
      window_shift: constant added to the window, so that no tap is forced to zero.
      convolution_width: width of the short convolution, in tokens.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: in calls, more tokens than `max_length`.
    """

    _mechanism = "hyena"
    _of_known_length = True
    _limited = True

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        order: int = 2,
        num_harmonics: int = 2,
        filter_features: int = 64,
        frequency: float = 10.0,
        window_shift: float = 0.01,
        convolution_width: int = 3,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        self.order = checks.at_least("order", order, 1, "convolutions")
        self.num_harmonics = checks.at_least("num_harmonics", num_harmonics, 1, "harmonics")
        hidden = checks.at_least("filter_features", filter_features, 1, "features")
        for name, number in (("window_shift", window_shift), ("frequency", frequency)):
            checks.finite(name, checks.real(name, number, "a number"))
        self.window_shift = float(window_shift)
        streams = (order + 1) * in_features

        make = Layers(**options)
        self.project = make.linear(in_features, streams)
        self.convolution = make.convolution(
            streams, convolution_width, activation=None, use_bias=True
        )
        self.out = make.out(in_features, in_features)
        # The filter network reads t and the sines and cosines of the harmonics.
        of_filters: Any = {**options, "dtype": None}
        make = Layers(**of_filters)
        sizes = (1 + 2 * num_harmonics, hidden, hidden)
        self.filter_layers = nnx.List(
            [make.linear(a, b, use_bias=True) for a, b in zip(sizes, sizes[1:], strict=False)]
        )
        self.filter_out = make.linear(hidden, order * in_features)
        self.frequency = make.constant(np.full((len(sizes) - 1, hidden), frequency))
        self.skip = make.constant(np.ones((order, in_features)))

    def filters(self) -> jax.Array:
        """Filters h `(N, max_length, D)`, in the parameter dtype, at least float32."""
        wide = dtypes.wide(self.skip[...].dtype)
        # Computed in the program: as constants, these arrays would be as large as the filters.
        number = jnp.arange(self.max_length)
        place = number.astype(wide) / self.max_length
        # Multiples of the position within a turn; products would overflow in long filters.
        multiples = itertools.accumulate(
            [number] * self.num_harmonics, lambda n, one: (n + one) % self.max_length
        )
        of_turn = jnp.stack(list(multiples), 1)
        angle = 2 * np.pi * of_turn.astype(wide) / self.max_length
        hidden = jnp.concatenate([place[:, None], jnp.cos(angle), -jnp.sin(angle)], 1)
        for layer, frequency in zip(self.filter_layers, self.frequency[...], strict=True):
            hidden = jnp.sin(frequency.astype(wide)[None] * layer(hidden))
        taps = self.filter_out(hidden).reshape(self.max_length, self.order, self.in_features)
        # Windows decay to 1 / 100 after 0.3 of the length (fastest) to 1.5 of it (slowest).
        rates = np.linspace(np.log(100) / 0.3, np.log(100) / 1.5, self.in_features)
        window = jnp.exp(-jnp.outer(place, jnp.asarray(rates, wide))) + self.window_shift
        return jnp.moveaxis(taps * window[:, None], 1, 0)

    def _streams(self, projected):
        """Gates `(N, B, T, D)` and value `(B, T, D)`."""
        *gates, value = jnp.split(projected, self.order + 1, -1)
        return jnp.stack(gates), value

    def _mix_all(self, x, lengths, segment_ids):
        padding = {"lengths": lengths, "segment_ids": segment_ids}
        gates, value = self._streams(self.convolution(self.project(x), **padding))
        y = hyena_convolution(gates, value, self.filters(), skip=self.skip[...], **padding)
        return self.out(y)

    def _empty(self, batch, max_length, dtype):
        shape = (batch, max_length, self.in_features)
        return HyenaState(
            inputs=tuple(jnp.zeros(shape, dtype) for _ in range(self.order)),
            last=self.convolution.init_state(batch, dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def _extend(self, x, state, lengths):
        batch, time = x.shape[:2]
        more = new_lengths(lengths, batch, time)
        check_capacity(state.length, more, state.inputs[0].shape[1])
        projected, last = self.convolution.extend(self.project(x), state.last, lengths)
        gates, z = self._streams(projected)
        positions = positions_from(state.length, time)
        inputs = []
        for n, taps in enumerate(self.filters()):
            inputs.append(stored(state.inputs[n], z, state.length, more))
            convolved = long_convolution_at(inputs[n].astype(z.dtype), taps, positions)
            z = gated(gates[n], convolved, z, self.skip[...][n])
        return self.out(z), HyenaState(tuple(inputs), last, state.length + more)
