"""What a mechanism's entry in `REFERENCES` says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """One mechanism's plain form and test options.

    Attributes:
      attend: `(arrays, pairs, keep, **options) -> results`. `arrays` are those that have
        gradients, as `tests.laws.battery.draw_arrays` names them; `pairs` are
        `tests.references.pairs.Pairs`, and `keep` the weights that dropout keeps, bool
        `(*B, N, T, S)` or None; `results` has "out" and, where claimed, "lse" or "state". It is
        run in float64 for the truth, and in float32 and bfloat16 for the error that is nobody's
        fault; its sums are at least float32.
      variants: options that together make the mechanism show all that it is, by label; the first
        goes through every law, the others through those about values.
      tuning: arguments that may not change a result, with values that cut the test lengths into
        several pieces of which the last is not whole.
      decoding: options for decoding, in place of those that it does not take.
      module: options of its module, where that has others than the function; None for the same.
      least_tokens: how many tokens the options of the variants need.
      more_keys: how many keys there are for dropout beside the tokens.
      state_and_segments: whether `segment_ids` go together with a state in a bidirectional call.
      arguments: `(rng, sizes) -> arrays by name`, what each call takes besides query, key and
        value, and has gradients for; `sizes` are `tests.laws.battery.Sizes`.
      per_token: the arguments `(*B, T, K, ...)`, given with the keys; their padding may hold NaN.
      per_head: of the others, which all examples share, those `(K, ...)` or `(N, ...)`.
      decays: the arguments that are logarithms of decays. They are at least float32 in every call,
        as they are summed over tokens.
      initial_state: `(rng, shapes) -> state`, random, from the state's pytree of
        `jax.ShapeDtypeStruct`, each leaf `(*B, K, ...)`. The default is uniform in [0.1, 1).
      normalized: whether the weights of a query sum to 1.
      bounded: `arrays -> arrays`, of which the results are finite where the mechanism leaves that
        to the caller; the default takes them as they are.
    """

    attend: Callable[..., dict[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    tuning: Mapping[str, Any]
    decoding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: Mapping[str, Any] | None = None
    least_tokens: int = 1
    more_keys: int = 0
    state_and_segments: bool = True
    arguments: Callable[[np.random.Generator, Any], dict[str, Any]] = lambda rng, sizes: {}
    per_token: frozenset[str] = frozenset()
    per_head: frozenset[str] = frozenset()
    decays: frozenset[str] = frozenset()
    initial_state: Callable[[np.random.Generator, Any], Any] | None = None
    normalized: bool = True
    bounded: Callable[[dict[str, Any]], dict[str, Any]] = dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerReference:
    """The plain form of a mechanism that takes no heads, and the options to test it with.

    Attributes:
      mix: `(mixer, x (T, D)) -> (T, D)`, of one row without padding, by the parameters of the mixer
        in the dtype of x; `mixer.is_causal` says which way.
      variants: options of the mixer that together make it show all that it is, by label; the first
        goes through every law, the others through those about values.
      tuning: options that may not change a result, with values that cut the test lengths into
        several pieces of which the last is not whole.
      cost: options at which its growth is counted, at a length; the default has the registry's.
      bounded: what the values of tokens are taken times, where the mechanism leaves it to the
        caller that the results are finite.
      transforms: whether it runs Fourier transforms.
      drawn: names of the mixer's arrays that are drawn and not learned, and so have no gradient.
      narrow: options for 16 bits, where those of the variants choose by comparing numbers, as by
        rounding they would choose otherwise.
    """

    mix: Callable[[Any, Any], Any]
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cost: Callable[[int], Mapping[str, Any]] = lambda length: {}
    bounded: float = 1.0
    transforms: bool = False
    drawn: frozenset[str] = frozenset()
    narrow: Mapping[str, Any] = dataclasses.field(default_factory=dict)
