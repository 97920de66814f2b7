"""What a mechanism's entry in `REFERENCES` says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


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
      state_and_segments: whether `segment_ids` go together with a state in a bidirectional call.
    """

    attend: Callable[..., dict[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    tuning: Mapping[str, Any]
    decoding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    state_and_segments: bool = True
