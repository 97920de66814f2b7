"""Ranking of mechanisms for a case: `effattn.advise`.

    advice = effattn.advise(16384, causal=True, decode=True)
    print(advice)              # a table, reasons, drawbacks and code
    advice.best.name           # `advice.options` has all options with their costs

A mechanism is a candidate if the registry has the direction, decoding and capabilities that the
case needs. Candidates come in this order:

1. Mechanisms that pay: their time grows more slowly than N^2, and a layer costs at most half of a
   layer of exact softmax attention, in operations of a forward and a backward pass (with `measure`,
   in seconds), and for decoding also in bytes of state. A mechanism whose weights do not compare
   two tokens finds nothing by content, and is in this group only if its quality is measured.
2. Exact softmax attention, which has no drawback but its cost.
3. The other candidates, first those that compare tokens.

Within a group the measured quality (`effattn.advice.quality`) decides, then the error on the
sample, then the cost. A mechanism without an error stands where an output of zeros would, which has
error 1.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from effattn import registry
from effattn.advice import facts, quality, samples
from effattn.advice.layers import Layer
from effattn.advice.report import REFERENCE, Advice, Option
from effattn.arrays import checks
from effattn.dispatch.support import support
from effattn.nn.build import named

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
PAYS, SQUARE = 0.5, 2.0
COMPILED = 10  # options that are compiled, beside exact softmax attention


def advise(
    length: int | None = None,
    *,
    causal: bool,
    decode: bool = False,
    exact: bool | None = None,
    needs: Sequence[str] = (),
    heads: int = 8,
    head_dim: int = 64,
    device: str | None = None,
    measure: bool = False,
    sample: Any = None,
    mechanisms: Sequence[str | Mapping[str, Any]] | None = None,
) -> Advice:
    """Ranks the mechanisms for a case; `effattn.advice.ranking` describes the order.

    A call traces a layer of each candidate and compiles the best ten: about a minute for all
    mechanisms on two CPU cores.

    Args:
      length: N, tokens of a sequence. Default: the length of the sample.
      causal: whether tokens attend to the past and the present only.
      decode: whether the layer also decodes token by token; needs `causal=True`.
      exact: True for the family "exact" alone, which compares all pairs of tokens; False for all
        other families; None for both.
      needs: further capabilities, names of `effattn.registry.CAPABILITIES`.
      heads: number of heads of the layer. A sample replaces `heads` and `head_dim` by its sizes.
      head_dim: features of a head.
      device: "cpu", "gpu" or "tpu", to name the kernels that run there; default this device.
        Operations and memory do not depend on it.
      measure: also measure the seconds of a forward and a backward pass, on this device.
      sample: `(query, key, value)`, arrays `(*B, T, N, H)`, or `(model, batch)`, a Flax module and
        its inputs: the errors of approximations are measured on the queries, keys and values of its
        `SelfAttention` layers, with the options for `length` tokens.
      mechanisms: names, or mappings with a name under "name" and options, such as
        `{"name": "sliding_window", "local_window_size": (63, 0)}`. Default: all that are
        registered.

    Returns:
      `Advice`. Without `measure`, equal calls give equal advice.

    Raises:
      ValueError: a wrong argument, an unknown name, or no candidate.
    """
    here = jax.default_backend()
    case = _Case(
        causal=checks.flag("causal", causal),
        decode=checks.flag("decode", decode),
        exact=None if exact is None else checks.flag("exact", exact),
        needs=_capabilities(needs),
        device=here if device is None else device,
    )
    if case.decode and not case.causal:
        raise ValueError("decode=True needs causal=True, got causal=False")
    if not isinstance(case.device, str) or case.device not in PLATFORMS:
        raise ValueError(f"device must be None or one of {', '.join(PLATFORMS)}, got {device!r}")
    if checks.flag("measure", measure) and case.device != here:
        raise ValueError(f"measure=True needs device={here!r}, this device, got {device!r}")
    arrays = None if sample is None else samples.heads_of(sample)
    if arrays is not None:
        tokens, heads, head_dim = arrays[0][0].shape[-3:]
        length = tokens if length is None else length
    if length is None:
        raise ValueError("length must be an int, 1 or more, if there is no sample; got None")
    length = checks.at_least("length", length, 1, "tokens")
    heads = checks.at_least("heads", heads, 1)
    head_dim = checks.at_least("head_dim", head_dim, 1, "features")
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even, as layers rotate pairs of features, got {head_dim}"
        )

    def counted(entry, given):
        return _counted(
            Layer(entry, MappingProxyType(given), heads, head_dim, causal), length, case
        )

    reference = counted(registry.get(REFERENCE), {})
    options: list[Option] = []
    left_out: dict[str, str] = {}
    for entry, given in _named(mechanisms):
        reason = case.reason_against(entry)
        if not reason:
            try:
                option = counted(entry, given)
            except (ValueError, ArithmeticError, NotImplementedError) as error:
                if given:  # the caller's options may be wrong
                    raise
                reason = f"{length:,} tokens do not suit its default options: {error}"
        if reason:
            left_out[entry.name] = reason
            continue
        if arrays is not None:
            distance, note = samples.error_of(option.layer, arrays, length)
            option = dataclasses.replace(option, error=distance, error_note=note)
        options.append(option)
    words = f"{case}: {length:,} tokens, {heads} heads of {head_dim} features"
    if arrays is not None and tokens != length:
        words += f"; errors are measured on a sample of {tokens:,} tokens"
    if not options:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"no mechanism fits the case ({words}): {reasons}")

    ranked = _ranked(options, reference)
    shown = [o for i, o in enumerate(ranked) if i < COMPILED or o.name == REFERENCE]
    others = [o for o in ranked if not any(o is each for each in shown)]
    shown = [_compiled(option, case, measure) for option in shown]
    if measure:
        measured = [o for o in shown if o.name == REFERENCE and not o.layer.given]
        reference = measured[0] if measured else _compiled(reference, case, measure)
    return Advice(
        case=words,
        options=(*_ranked(shown, reference), *others),
        left_out=MappingProxyType(left_out),
    )


@dataclasses.dataclass(frozen=True)
class _Case:
    """Needs of the caller, as in `advise`."""

    causal: bool
    decode: bool
    exact: bool | None
    needs: tuple[str, ...]
    device: str

    def __str__(self) -> str:
        exact = {None: [], True: ["exact"], False: ["not exact"]}[self.exact]
        decode = ["with decoding"] if self.decode else []
        needs = [f"with {' and '.join(self.needs)}"] if self.needs else []
        return ", ".join(
            [
                f"{self.direction.capitalize()} attention",
                *exact,
                *decode,
                *needs,
                f"on a {self.device.upper()}",
            ]
        )

    @property
    def direction(self) -> str:
        return "causal" if self.causal else "bidirectional"

    def reason_against(self, entry: registry.Mechanism) -> str:
        """Returns the reason why a mechanism is no candidate, or ""."""
        for capability in (self.direction, *["decode"] * self.decode, *self.needs):
            if capability not in entry.capabilities:
                return facts.lacking(entry, capability)
        is_exact = facts.kind(entry) == facts.EXACT
        if self.exact is None or self.exact == is_exact:
            return ""
        return "is exact" if is_exact else "is not exact"


def _capabilities(needs: Sequence[str]) -> tuple[str, ...]:
    names = tuple(needs) if np.iterable(needs) else (needs,)
    if isinstance(needs, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"needs must be a sequence of names of capabilities, got {needs!r}")
    return tuple(map(facts.check_capability, names))


def _named(mechanisms: Any) -> Iterator[tuple[registry.Mechanism, dict[str, Any]]]:
    """Yields the registry's entry and the options of each mechanism."""
    given = registry.names() if mechanisms is None else mechanisms
    given = (given,) if isinstance(given, str | Mapping) or not np.iterable(given) else tuple(given)
    if not given:
        raise ValueError(
            f"mechanisms must have a name or more, or be None for all of them, got {mechanisms!r}"
        )
    for mechanism in given:
        name, options = named("mechanisms", mechanism)
        yield facts.find(name), options


def _counted(layer: Layer, length: int, case: _Case) -> Option:
    """Returns the option with its operations, decode state and quality."""
    state = twice = None
    if case.decode:
        state, twice = layer.state_bytes(length), layer.state_bytes(2 * length)
    name = layer.entry.name
    results = [r for r in quality.read() if (r.mechanism, r.is_causal) == (name, case.causal)]
    return Option(
        layer=layer,
        length=length,
        operations=layer.operations(length),
        state_bytes=state,
        constant_state=None if state is None else state == twice,
        quality=tuple(results),
    )


def _compiled(option: Option, case: _Case, measure: bool) -> Option:
    """Returns the option with memory, seconds and kernels."""
    size, seconds = option.layer.compiled(option.length, measure)
    on_device = [r for r in support(option.name) if r.platform == PLATFORMS[case.device]]
    return dataclasses.replace(
        option,
        compiled=True,
        temporary_bytes=size,
        seconds=seconds,
        kernels=tuple(row.implementation for row in on_device),
    )


def _ranked(options: Sequence[Option], reference: Option) -> list[Option]:
    """Returns the options with their cost relative to the reference, best first."""

    def related(option):
        share = option.operations / reference.operations
        if option.seconds is not None and reference.seconds is not None:
            share = option.seconds / reference.seconds
        pays = share <= PAYS and option.layer.entry.time_exponent < SQUARE
        if option.state_bytes is not None and reference.state_bytes is not None:
            pays = pays and option.state_bytes <= PAYS * reference.state_bytes
        return dataclasses.replace(option, share=share, pays=pays)

    def rank(option):
        compares = facts.compares_tokens(option.layer.entry)
        return (
            0 if option.may_lead else 1 if option.name == REFERENCE else 2,
            not (option.may_lead or compares),
            math.inf if option.score is None else -option.score,
            1.0 if option.error is None else option.error,
            option.share,
        )

    return sorted(map(related, options), key=rank)
