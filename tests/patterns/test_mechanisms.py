"""The registered pattern of a mechanism against the pairs that its function attends to."""

import inspect

import numpy as np
import pytest

from effattn import registry
from effattn.analysis import mixing_weights
from effattn.patterns import Causal
from tests.marks import slow

LENGTH, HEADS, KEY_HEADS = 22, 4, 2
TABLE = np.array([[1, -1], [0, 0], [2, 4], [5, 2], [0, 3], [1, 4]])

CASES = [
    ("sparse_transformer", {"stride": 4}),
    ("sparse_transformer", {"stride": 5, "kind": "fixed", "summary": 2}),
    ("bigbird", {"block_size": 4, "num_global_blocks": (1, 1), "num_random_blocks": 1}),
    ("bigbird", {"block_size": 4, "is_causal": True, "num_random_blocks": 1}),
    slow(("bigbird", {"block_size": 4, "random_blocks": np.stack([TABLE, TABLE[::-1]])})),
    ("random", {"block_size": 4, "num_random_blocks": 2}),
    slow(("random", {"block_size": 4, "random_blocks": TABLE, "is_causal": True})),
    (
        "block_sparse",
        {"block_size": 4, "block_mask": np.random.default_rng(0).random((4, 6, 6)) < 0.4},
    ),
]


def test_all_patterns_are_compared():
    entries = map(registry.get, registry.names())
    names = {getattr(case, "values", (case,))[0][0] for case in CASES}
    assert names == {entry.name for entry in entries if entry.pattern is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mechanism_attends_to_its_pattern(case):
    name, options = case
    entry = registry.get(name)
    known = inspect.signature(entry.function).parameters.items()
    known = {option: parameter.default for option, parameter in known} | options
    is_causal = known.get("is_causal") is True
    sizes = {"length": LENGTH, "heads": HEADS, "key_heads": KEY_HEADS, "is_causal": is_causal}
    named = inspect.signature(entry.pattern).parameters
    pattern = entry.pattern(**{n: x for n, x in (known | sizes).items() if n in named})
    mask = (pattern & Causal() if is_causal else pattern).mask(LENGTH)
    mask = mask.repeat(HEADS // len(mask), 0) if pattern.heads else mask[None].repeat(HEADS, 0)
    query, key = (np.ones((LENGTH, heads, 8), np.float32) for heads in (HEADS, KEY_HEADS))
    weights = mixing_weights(name, query=query, key=key, **options)
    np.testing.assert_array_equal(np.asarray(weights) > 0, mask)
