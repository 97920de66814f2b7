"""The inputs on which a mechanism is tested."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arguments = Callable[..., dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Inputs and options on which the laws test a mechanism. All fields have defaults.

    Attributes:
      variants: sets of options by label. The first one goes through every law, the others through
        the laws about values.
      self_attention: labels of the variants that need as many keys as queries.
      tuning: arguments that may not change a result, with values that cut the test lengths into
        several pieces, the last of them shorter.
      arguments: `(rng, sizes) -> arrays by name`: the mechanism's own arrays with gradients; `rng`
        is a NumPy generator and `sizes` a `Sizes`. An array named query or key replaces the drawn
        one. A mapping gives each variant its own function.
      masks: the mechanism's own bool arguments `(*B, T)` by name; each value is a function
        `length -> options`, which a call with the mask also passes.
      decays: names of own arguments that are logarithms of decays; at least float32 in every call.
      acts_late: names of own arguments that act on the fourth token at the earliest in causal
        calls. All others act on the third one.
      initial_state: `(rng, shapes) -> state`, random, from a pytree of `jax.ShapeDtypeStruct`.
        Default: uniform in [0.1, 1).
      state_and_segments: whether a bidirectional call takes a state and `segment_ids` together.
      cross_and_segments: whether a call with other keys than queries takes `segment_ids`.
      normalized: whether the weights of a query sum to 1.
      unnormalized: labels of the variants in which the weights of a query do not sum to 1, although
        `normalized` is True.
      bounded: `arrays -> arrays` that keeps extreme inputs in the range where the mechanism
        promises finite results; default: all inputs.
      mixes_queries: whether a query changes the outputs of other queries.
      least_tokens: least number of tokens that the options of a variant allow, a number for all
        variants or a number for each.
      decoding: options that replace those of the variant in decoding.
      module: options of the mixer; None for those of the variant.
      mix: for a mechanism without heads, `(mixer, x (T, D)) -> (T, D)`: its naive form with the
        mixer's parameters. Default: the registered naive form.
      drawn: names of arrays in the mixer that are drawn and not learned: they have no gradient.
    """

    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    self_attention: frozenset[str] = frozenset()
    tuning: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: Arguments | Mapping[str, Arguments] = lambda rng, sizes: {}
    masks: Mapping[str, Callable[[int], Mapping[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    decays: frozenset[str] = frozenset()
    acts_late: frozenset[str] = frozenset()
    initial_state: Callable[..., Any] | None = None
    state_and_segments: bool = True
    cross_and_segments: bool = True
    normalized: bool = True
    unnormalized: frozenset[str] = frozenset()
    bounded: Callable[[dict[str, Any]], dict[str, Any]] = dict
    mixes_queries: bool = False
    least_tokens: int | Mapping[str, int] = 1
    decoding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    module: Mapping[str, Any] | None = None
    mix: Callable[..., Any] | None = None
    drawn: frozenset[str] = frozenset()

    def own(self, variant: str, rng: np.random.Generator, sizes: Any) -> dict[str, Any]:
        """The own arrays of a variant."""
        arguments = self.arguments
        return (arguments[variant] if isinstance(arguments, Mapping) else arguments)(rng, sizes)
