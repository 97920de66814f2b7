"""Calls that name no implementation agree with the naive form: lengths, ids, direction and x64.

The default takes CPU kernels in float32 where it can. The results are those of the float64
reference, for each integer dtype and each container of lengths and ids.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.testing import functions
from effattn.testing.functions import SQUARE, Extent, Sizes
from tests.laws.battery import KINDS_OF_KERNELS, MECHANISMS, WITH_KERNELS

LONG = Sizes((2,), 80, 80)
# Without x64, the other mechanisms show nothing new; without a kernel, the laws run the default.
QUICK = "softmax", "sliding_window", "linear"
GIVEN = [(), ("lengths",), ("segments",), ("lengths", "segments")]
CONTAINERS = [
    np.int32,
    np.int64,
    np.uint8,
    lambda x: np.asarray(x).tolist(),
    jnp.int16,
    np.uint32,
    jnp.int32,
    np.uint64,
]


def cases():
    number = itertools.count()
    for subject in MECHANISMS:
        ways = [way for way in ("causal", "bidirectional") if subject.has(way)]
        takes = [given for given in GIVEN if all(map(subject.has, given))]
        for way, given, x64 in itertools.product(ways, takes, (False, True)):
            if "segments" in given and not functions.takes_segments(
                subject, Extent(way == "causal")
            ):
                continue
            of_case = subject
            if subject.name == "bigbird" and given == ("lengths",):
                # The naive form is run with documents, which have last blocks of their own. In a
                # padded row the last blocks are those of the row, so here no last block is global.
                of_case = with_options(subject, num_global_blocks=1)
            # Each container is given without and with x64, which take turns.
            container = CONTAINERS[next(number) // 2 % len(CONTAINERS)]
            label = "-".join([str(subject), way, *given, *["x64"] * x64])
            all_or_nothing = given in ((), takes[-1])
            shows_kernel = x64 and subject.name in KINDS_OF_KERNELS
            is_quick = all_or_nothing and (subject.name in QUICK or shows_kernel)
            marks = [] if is_quick else pytest.mark.slow
            yield pytest.param(of_case, way, given, x64, container, id=label, marks=marks)


def with_options(subject, **options):
    options = subject.case.variants[subject.variant] | options
    case = dataclasses.replace(subject.case, variants={subject.variant: options})
    return subject._replace(case=case)


@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_which_mechanisms_take_kernels_for_cpus(subject):
    """The laws test both forms of the mechanisms that take CPU kernels, and of no others."""
    arrays = functions.draw_arrays(subject, sizes_of(subject), everything=False)
    arrays = functions.cast(subject, arrays, jnp.float32)

    def forward(is_causal):
        extent = Extent(is_causal, tuning=False)
        return jax.make_jaxpr(lambda a: functions.call(subject, extent, a, {}))(arrays)

    ways = [way == "causal" for way in ("causal", "bidirectional") if subject.has(way)]
    kernels = "effattn_block_att", "effattn_linear_rec", "effattn_diagonal_rec"
    has_kernel = any(kernel in str(j) for j in map(forward, ways) for kernel in kernels)
    assert has_kernel == (subject.name in WITH_KERNELS)


def sizes_of(subject):
    """More than one tile, unless the subject's options hold arrays for other lengths."""
    options = subject.options
    is_bound = any(np.ndim(option) for option in options.values()) or "max_length" in options
    return SQUARE._replace(batch=(2,)) if is_bound else LONG


def draw_known(sizes, given):
    """Lengths and ids of both rows; one example has documents on both sides of a tile's edge."""
    length, known = sizes.keys, {}
    if "lengths" in given:
        known["query_seq_lengths"] = np.array([length - 3, length // 2])
        known["key_value_seq_lengths"] = np.array([length - 6, length // 3])
    if "segments" in given:
        parts = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.1, 0.75, 0.15, 0])
        ends = (np.cumsum(part)[:-1] * length for part in parts)
        ids = ([1, 2, 3, 4], [7, 0, 5, 5])
        token = np.arange(length)
        rows = [
            np.take(i, np.searchsorted(end, token, "right"))
            for i, end in zip(ids, ends, strict=True)
        ]
        known["segment_ids"] = np.stack(rows)
    return known


@pytest.mark.parametrize(("subject", "way", "given", "x64", "container"), list(cases()))
def test_the_default_agrees_with_float64(subject, way, given, x64, container):
    sizes = sizes_of(subject)
    extent = Extent(way == "causal", tuning=False)
    known = draw_known(sizes, given)
    arrays = functions.draw_arrays(subject, sizes, everything=False)
    single = functions.cast(subject, arrays, jnp.float32)
    cotangents = functions.cotangents_of(subject, extent, single, known)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (single, cotangents))
        expected = functions.run_naive(subject, sizes, extent, wide[0], known, wide[1])

    def run(arrays, cotangents):
        given = {name: container(x) for name, x in known.items()}
        results, pull_back = jax.vjp(lambda a: functions.call(subject, extent, a, given), arrays)
        return results, pull_back(cotangents)[0]

    with jax.enable_x64(x64):
        ours = functions.to_numpy(jax.jit(run)(single, cotangents))
    functions.assert_close(ours, expected, 2e-5)
