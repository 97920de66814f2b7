"""Facts about mechanisms in plain words, derived from the registry."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from effattn import registry
from effattn.arrays import checks
from effattn.registry import Mechanism

EXACT, APPROXIMATE, OTHER = "exact", "approximate", "other"

KINDS: Mapping[str, str] = MappingProxyType(
    {
        EXACT: "compares all pairs of tokens, without approximation (only the family exact)",
        APPROXIMATE: "approximates softmax attention, or attends to some pairs only",
        OTHER: "is another function, not an approximation of softmax attention",
    }
)

# Drawbacks of each family, compared with exact softmax attention.
_GIVES_UP: Mapping[str, str] = MappingProxyType(
    {
        "exact": "it is another function than plain softmax attention: a model trained with "
        "softmax attention has to be trained again",
        "sparse": "a token reads only the tokens of its pattern; other tokens reach it through "
        "several layers, or not at all",
        "low rank": "distant tokens are read as a few summaries, not one by one",
        "clustered": "a token reads only tokens of its cluster; a relevant token elsewhere is "
        "missed",
        "linear": "all tokens share a state of fixed size, in which many items blur",
        "recurrent": "the past is a state of fixed size, in which old items fade or are "
        "overwritten",
        "state space": "the past is a state of fixed size, and no token looks another one up by "
        "its content",
        "attention-free": "tokens are mixed without comparing them: none looks another one up by "
        "its content",
        "synthetic": "weights come from one token or from positions, not from a comparison of two "
        "tokens",
        "hybrid": "each part has the drawbacks of its mechanism",
        "baseline": "the past is a small state or a window, and no token looks another one up by "
        "its content",
    }
)

_FAMILIES_THAT_APPROXIMATE = frozenset({"sparse", "low rank", "clustered"})
_RANDOM_FEATURES_OF_SOFTMAX = frozenset({"performer", "random_features"})
# Also all functions of heads.
_FAMILIES_THAT_COMPARE = frozenset({"exact", "sparse", "low rank", "clustered", "hybrid"})
_MIXTURE = "synthesizer_mixture"  # with dot-product attention

# Capabilities of softmax attention whose absence is worth a word.
_MISSED = ("lengths", "segments", "dropout", "mask", "bias")


def find(name: str) -> Mechanism:
    """Returns the registry entry; the `ValueError` for an unknown name suggests similar names."""
    return registry.get(check_known("mechanism", name, registry.names()))


def check_capability(name: str) -> str:
    """Returns the name; the `ValueError` for an unknown capability suggests similar names."""
    return check_known("capability", name, tuple(registry.CAPABILITIES))


def check_known(what: str, name: Any, known: Sequence[str]) -> str:
    """Returns the name; the `ValueError` for a name that is not known suggests similar names."""
    if name in known:
        return name
    raise ValueError(f"unknown {what} {name!r}; {checks.suggestion(name, known)}")


def kind(entry: Mechanism) -> str:
    """Returns the kind of a mechanism, a key of `KINDS`."""
    if entry.family == "exact":
        return EXACT
    approximates = entry.family in _FAMILIES_THAT_APPROXIMATE
    return APPROXIMATE if approximates or entry.name in _RANDOM_FEATURES_OF_SOFTMAX else OTHER


def compares_tokens(entry: Mechanism) -> bool:
    """Returns whether the weight of a pair depends on both tokens, so that content is found."""
    compares = entry.family in _FAMILIES_THAT_COMPARE or entry.name == _MIXTURE
    return entry.takes_heads or compares


def idea(entry: Mechanism) -> str:
    """Returns the first sentence of the mechanism's file, or else of its function or layer."""
    own = sys.modules.get(f"effattn.functional.{entry.name}")
    text = getattr(own, "__doc__", None) or getattr(entry.function, "__doc__", None)
    if text is None:
        text = registry.load(entry.builder).__doc__ or entry.paper
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split()).rstrip(".:")


def directions(entry: Mechanism) -> str:
    """Returns "causal", "bidirectional" or both."""
    return " and ".join(d for d in ("causal", "bidirectional") if d in entry.capabilities)


def gives_up(entry: Mechanism) -> tuple[str, ...]:
    """Returns the drawbacks of the mechanism, as sentences without a full stop."""
    if entry.name == "softmax":
        return ("none, as it is exact softmax attention",)
    unknown = f"unknown: effattn does not know the family {entry.family!r}"
    found = [_GIVES_UP.get(entry.family, unknown)]
    if entry.name == _MIXTURE:
        found = ["a learned share of each logit does not come from a comparison of two tokens"]
    if entry.causality == "rounding":
        found.append("later tokens change the rounding of earlier outputs")
    if entry.memory_exponent > 1:
        found.append(f"memory grows as N^{entry.memory_exponent:g}")
    softmax = registry.get("softmax").capabilities
    missed = [name for name in _MISSED if name in softmax - entry.capabilities]
    if missed:
        found.append(f"it does not support {', '.join(missed)}")
    return tuple(found)


def lacking(entry: Mechanism, capability: str) -> str:
    """Returns the reason why a mechanism without a capability is left out."""
    reason = entry.reasons.get(capability)
    lacks = f"lacks {capability!r} ({registry.CAPABILITIES[capability]})"
    return lacks if reason is None else f"{lacks}, as {reason}"
