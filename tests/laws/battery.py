"""Mechanisms for each law: all, or a few that show what a core does."""

import functools
from collections.abc import Sequence
from typing import Any

from effattn import registry
from effattn.testing import mixers
from effattn.testing.functions import Subject
from effattn.testing.mixers import Mixer
from effattn.testing.subjects import OfFunction
from tests.cases import FUNCTIONS, MIXERS
from tests.marks import slow_but_for

NAMES = [name for name in registry.names() if registry.get(name).takes_heads]
# SUBJECTS holds all variants. MECHANISMS holds the first variant of each mechanism, for every law.
# LAST holds the last variant of each, for bidirectional calls.
SUBJECTS = [Subject(n, v, FUNCTIONS[n]) for n in NAMES for v in FUNCTIONS[n].variants]
MECHANISMS = list({s.name: s for s in reversed(SUBJECTS)}.values())[::-1]
LAST = list({s.name: s for s in SUBJECTS}.values())

# Mechanisms of which some float32 calls take CPU kernels unless the call names an implementation.
# Laws on float32 values test both the default and the XLA form of these mechanisms.
WITH_KERNELS = frozenset(
    {
        "based",
        "block_linformer",
        "block_sparse",
        "cosformer",
        "delta_net",
        "delta_product",
        "differential",
        "forgetting",
        "gated_delta_net",
        "gated_delta_net_2",
        "gated_linear",
        "gated_slot",
        "hedgehog",
        "hgrn2",
        "infini",
        "kimi_delta",
        "lightning",
        "linear",
        "linformer",
        "long_short",
        "longformer",
        "luna",
        "mamba",
        "mamba2",
        "mamba3",
        "mesa",
        "mlstm",
        "moba",
        "native_sparse",
        "nystrom",
        "performer",
        "random",
        "random_features",
        "retention",
        "routing",
        "rwkv6",
        "rwkv7",
        "sliding_window",
        "softmax",
        "sparse_transformer",
        "streaming",
    }
)
MECHANISMS = [s._replace(tuned=s.name not in WITH_KERNELS) for s in MECHANISMS]
# `tests.cores.test_chosen_blocks` compares the two forms of these, whose laws take long.
COMPARED = frozenset({"moba", "native_sparse"})
# Among users of the linear recurrence, these have its XLA form under the laws: a normaliser,
# decays of tokens and of features, the delta form, and reads before the token. `tests.xla` has all.
RECURRENCES = frozenset({"linear", "gated_delta_net", "rwkv6", "mamba"})
BY_XLA = [
    s._replace(implementation="xla", tuned=True)
    for s in MECHANISMS
    if s.name in WITH_KERNELS - COMPARED
    and (s.entry.family not in ("linear", "recurrent") or s.name in RECURRENCES)
]
IN_FLOAT32 = [*MECHANISMS, *BY_XLA]


def first_of_families(subjects: Sequence[Any]) -> list[Any]:
    """One subject of each family, which shows the properties that its family shares."""
    return list({subject.entry.family: subject for subject in reversed(subjects)}.values())


FIRST_OF_FAMILY = first_of_families(MECHANISMS)
# One mechanism for each core with a backward pass of its own.
FIRST_OF_CORE = [
    subject
    for subject in MECHANISMS
    if subject.name in ("softmax", "linear", "nystrom", "routing", "moba", "mamba", "bigbird")
]
FIRST_NAMES = [subject.name for subject in FIRST_OF_FAMILY]
# For laws that are not about values alone.
CALLED = slow_but_for(FIRST_OF_FAMILY, MECHANISMS)
# One mechanism for each kind of kernel for CPUs, besides those of `RECURRENCES`.
KINDS_OF_KERNELS = RECURRENCES | {
    "softmax",
    "block_sparse",
    "forgetting",
    "gated_delta_net_2",
    "mesa",
    "native_sparse",
}
CALLED_IN_FLOAT32 = slow_but_for(
    [s for s in IN_FLOAT32 if s.name in (*FIRST_NAMES, *KINDS_OF_KERNELS)], IN_FLOAT32
)
# For laws of a core: the other families run on the cores of these two.
WITH_CORES = [s for s in FIRST_OF_FAMILY if s.entry.family in ("exact", "recurrent")]
OF_CORES = slow_but_for(WITH_CORES, MECHANISMS)
OF_CORES_IN_FLOAT32 = slow_but_for(
    [s for s in IN_FLOAT32 if s.name in {core.name for core in WITH_CORES}], IN_FLOAT32
)
# The same two cores under other mechanisms, so that no mechanism bears the cost of all laws.
ALSO_OF_CORES = slow_but_for(
    [s for s in MECHANISMS if s.name in ("sliding_window", "linear")], MECHANISMS
)


of_function = functools.cache(OfFunction)


def mixer_of(subject: Subject) -> Any:
    """The mechanism's mixer with random parameters."""
    return of_function(subject).mixer


# Mechanisms without heads.
MIXER_SUBJECTS = [
    Mixer(n, v, MIXERS[n], d)
    for n in MIXERS
    for v in MIXERS[n].variants
    for d in mixers.directions(n)
]
# The first variant of each mechanism, for the laws that are not about values.
FIRST_MIXERS = list(
    {
        s.name: s for s in reversed(MIXER_SUBJECTS) if s.variant == next(iter(s.case.variants))
    }.values()
)[::-1]
# One mechanism of each layer class, for the laws on calls from larger programs, where the kinds of
# one layer behave alike.
LAYERS = list({s.entry.builder: s for s in reversed(FIRST_MIXERS)}.values())[::-1]
# One mechanism of each family in which no mechanism has heads.
FIRST_MIXER_OF_FAMILY = [
    s
    for s in first_of_families(FIRST_MIXERS)
    if s.entry.family not in {m.entry.family for m in MECHANISMS}
]
# Hybrids run on the cores of their parts.
MIXERS_WITH_CORES = [s for s in FIRST_MIXER_OF_FAMILY if s.entry.family != "hybrid"]
