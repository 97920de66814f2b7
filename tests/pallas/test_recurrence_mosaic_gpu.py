"""The Hopper kernels of the linear recurrence: interpreted, against float64; lowered; and refused.

Races between warpgroups are detected.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import effattn
from effattn import dispatch
from effattn.pallas.mosaic_gpu import recurrence_plan
from effattn.pallas.mosaic_gpu.recurrence_plan import Plan, running_sums
from tests.marks import slow
from tests.pallas.lowering import MOSAIC_GPU, TRITON, kernel_bytes, kernels_of
from tests.pallas.recurrence_cases import (
    documents,
    draw,
    errors,
    exact,
    one_document,
    program,
    recurrence,
    with_gradients,
)
from tests.pallas.test_block_mosaic_gpu import with_devices
from tests.xla.test_linear_recurrence import ALL


def narrow(terms, state):
    """The terms with queries, keys and values in bfloat16; decays and states keep float32."""
    rounded = {
        name: jnp.asarray(x, jnp.bfloat16)
        for name, x in terms._asdict().items()
        if x is not None and name != "log_decay"
    }
    return terms._replace(**rounded), jnp.asarray(state)


def interpreted(terms, state, tokens=ALL, normalized=False):
    """Results and gradients of the kernels, in which no two warpgroups race for memory."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    function = functools.partial(
        recurrence,
        tokens=tokens,
        normalized=normalized,
        names=("mosaic_gpu",),
        interpreted=plgpu.InterpretGPUParams(detect_races=True),
    )
    found = jax.block_until_ready(with_gradients(function, terms, state))
    assert not get_races().races_found
    return found


def assert_near(ours, expected, most=0.006):
    """Errors (root mean squares) are at most 1.5 times 2^-8, the bound of bfloat16 rounding."""
    for error, _, size in errors(ours, ours, expected):
        assert error <= most * size


@with_devices
@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "form"),
    [
        (130, "token", (2, 1, 1), (5, 70), "plain"),
        slow(1, "token", (1, 1, 1), (3, 5), "plain"),
        slow(64, "none", (1, 1, 2), (70, 40), "plain"),
        slow(100, "head", (1, 1, 1), (128, 64), "bonus"),
        slow(130, "token", (4, 2, 2), (70, 20), "delta"),
        slow(100, "none", (1, 1, 2), (64, 70), "delta"),
        slow(130, "feature", (2, 1, 1), (70, 40), "plain"),
        slow(100, "feature", (1, 1, 1), (40, 70), "bonus"),
        slow(130, "feature", (1, 1, 1), (5, 6), "delta"),
        slow(70, "feature", (1, 1, 1), (5, 6), "own"),
    ],
)
def test_agrees_with_one_token_at_a_time(length, decay, heads, sizes, form):
    """Partial chunks, shared heads, and sizes of several tiles or of less than a tile."""
    args = narrow(*draw(length, decay, heads, sizes, form=form))
    assert_near(interpreted(*args), exact(*args))


@pytest.mark.slow
@with_devices
@pytest.mark.parametrize("decay", ["none", "token"])
def test_a_long_sequence_of_few_heads_is_walked_in_pieces(decay, monkeypatch):
    monkeypatch.setattr(recurrence_plan, "_SHORTEST_PIECE", 2)
    args = narrow(*draw(450, decay, (1, 1, 1), (5, 6)))
    plan = Plan(2, 450, 1, 1, 1, 64, 64, decay, True)
    assert plan.chunks == 8 and plan.chunks_of_a_piece(1) == 2
    assert_near(interpreted(*args), exact(*args))


@pytest.mark.slow
@with_devices
@pytest.mark.parametrize(
    ("decay", "form"),
    [
        ("none", "plain"),
        ("token", "bonus"),
        ("token", "delta"),
        ("feature", "plain"),
        ("feature", "delta"),
    ],
)
def test_documents_and_masks(decay, form):
    args = narrow(*draw(103, decay, (2, 1, 1), (5, 6), form=form))
    tokens = documents()
    assert_near(interpreted(*args, tokens), exact(*args, tokens))


@pytest.mark.slow
@with_devices
@pytest.mark.parametrize("decay", ["token", "feature"])
def test_decays_that_forget_much_or_all(decay):
    """Gradients do not pass through a decay of zero."""
    terms, state = draw(103, decay, (2, 1, 1), (5, 6))
    strong = 40 * terms.log_decay
    strong[:, 20], strong[:, 66] = -1e4, -np.inf
    args = narrow(terms._replace(log_decay=strong), state)
    ours = interpreted(*args, one_document())
    assert_near(ours, exact(*args, one_document()))
    assert not np.any(ours[1][0].log_decay[:, 66])


@pytest.mark.parametrize("forgotten", [1, 31, 62])
def test_sums_of_decays_that_forget_all_keep_their_digits(forgotten):
    """Decays after tokens that forget all round less than bfloat16, and those over them are 0."""
    log_decay = jnp.where(jnp.arange(64) < forgotten, -jnp.inf, -0.01)[None, :, None]
    sums = np.asarray(running_sums(log_decay))[0, 0]
    i, j = np.tril_indices(64, -1)
    decays, over = np.exp2(sums[i] - sums[j]), j + 1 < forgotten
    np.testing.assert_array_equal(decays[over], 0)
    np.testing.assert_allclose(decays[~over], np.exp(-0.01 * (i - j))[~over], rtol=2**-10)


@pytest.mark.slow
@with_devices
def test_errors_of_a_normalised_recurrence_are_at_most_twice_those_of_the_plain_form():
    """The gradient of the queries is a small difference of large sums."""
    args = narrow(*draw(103, "none", (2, 1, 1), (40, 30), normalized=True))

    def plain(terms, state):
        def sums(values):
            weights = jnp.einsum("btnf,bsnf->bnts", terms.query, jnp.repeat(terms.key, 2, 2))
            weights = jnp.where(jnp.tri(103, dtype=bool), weights, 0)
            read = jnp.einsum("btnf,bfd->btnd", terms.query, start[:, 0])
            return jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(values, 2, 2)) + read

        start = state.astype(jnp.bfloat16)
        values = jnp.concatenate([terms.value, jnp.ones_like(terms.value[..., :1])], -1)
        found = sums(values)
        written = jnp.einsum("bsnf,bsnd->bnfd", terms.key, values)
        return found[..., :-1] / found[..., -1:], written + state

    ours, theirs = interpreted(*args, normalized=True), with_gradients(plain, *args)
    for error, other, size in errors(ours, theirs, exact(*args, normalized=True)):
        assert error <= 2 * other + 1e-6 * size


@pytest.mark.slow
@with_devices
def test_padding_may_hold_anything_and_queries_have_a_scale():
    """NaN in padding reaches no output and no gradient."""
    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=(2, 70, 1, n)) for n in (4, 4, 6)] + [-rng.random((2, 70, 1))]
    lengths = np.asarray([70, 7])
    for array in arrays:
        array[1, 7:] = np.nan
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in arrays[:3])

    @functools.partial(jax.jit, static_argnames="name")
    def run(*args, name):
        def attend(query, key, value, log_decay):
            return effattn.gated_linear_attention(
                query,
                key,
                value,
                log_decay=log_decay,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                scale=0.3,
                return_state=True,
                implementation=name,
            )

        results, pull_back = jax.vjp(attend, *args)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    args = query, key, value, jnp.asarray(arrays[3], jnp.float32)
    with dispatch.interpreted():
        ours = run(*args, name="mosaic_gpu")
    assert_near(ours, run(*args, name="xla"))


# Lowered


@pytest.mark.parametrize(
    ("gate", "sizes", "delta"),
    [
        slow(None, (64, 64), False),
        (2, (96, 192), False),
        slow(3, (128, 128), False),
        slow(2, (64, 128), True),
        slow(3, (128, 128), True),
    ],
)
def test_it_is_lowered_for_gpus(gate, sizes, delta):
    """Lowering checks that a block fits into shared memory."""
    function, arrays, ids = program(jnp.bfloat16, gate, sizes, "mosaic_gpu", delta)
    assert kernels_of(function, arrays, ids) == {MOSAIC_GPU}


@pytest.mark.parametrize("attend", ["linear_attention", "delta_rule_attention"])
def test_64_bit_types_do_not_matter(attend):
    """Long enough to be walked in pieces."""
    array = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.bfloat16)
    given = {"query": array, "key": array, "value": array}
    options = {"is_causal": True}
    if attend == "delta_rule_attention":
        given["beta"], options = jax.ShapeDtypeStruct(array.shape[:3], jnp.bfloat16), {}

    def gradients(given):
        def total(given):
            function = getattr(effattn, attend)
            return function(**given, **options, implementation="mosaic_gpu").sum()

        return jax.grad(total)(given)

    with jax.enable_x64(True):
        assert kernels_of(gradients, given) == {MOSAIC_GPU}


@pytest.mark.parametrize("gated", [slow(False), True])
def test_bytes_of_a_forward_pass(gated):
    """Kernels move about three times the bytes of the arguments and of the output.

    The states have as many bytes as keys and values together, and are written and read. As the
    sequences are walked in pieces, keys and values are read three times.
    """
    shape = (2, 4096, 8, 128)
    arrays = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    attend = effattn.retention
    if gated:
        arrays["log_decay"] = jax.ShapeDtypeStruct(shape[:3], jnp.bfloat16)
        attend = effattn.gated_linear_attention
    least = sum(x.size * 2 for x in arrays.values()) + math.prod(shape) * 2
    moved = kernel_bytes(lambda arrays: attend(**arrays, implementation="mosaic_gpu"), arrays)
    assert moved <= 3.3 * least


# The choice, and refused arguments


def call(dtype=jnp.bfloat16, heads=(2, 2), sizes=(64, 64), by_feature=False, **options):
    queries, keys = heads
    arrays = {
        "query": jnp.ones((1, 128, queries, sizes[0]), dtype),
        "key": jnp.ones((1, 128, keys, sizes[0]), dtype),
        "value": jnp.ones((1, 128, keys, sizes[1]), dtype),
    }
    if "beta" in options:
        return effattn.delta_rule_attention(**arrays, **options)
    log_decay = jnp.zeros((1, 128, keys, sizes[0]) if by_feature else (1, 128, keys))
    return effattn.gated_linear_attention(**arrays, log_decay=log_decay, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16 queries and outputs, got float32"),
        ({"dtype": jnp.float16}, "takes bfloat16 queries and outputs, got float16"),
        (
            {"by_feature": True, "sizes": (64, 130)},
            "takes up to 128 features and values with decays of features and in the delta form, "
            "got 64 and 130",
        ),
        (
            {"sizes": (160, 130)},
            "takes states of up to 24,576 numbers after padding to multiples of 64, got 160 x 130",
        ),
        ({"precision": "highest"}, "multiplies numbers of 16 bits, got precision 'highest'"),
        (
            {"beta": jnp.ones((1, 128, 2)), "sizes": (192, 64)},
            "takes up to 128 features and values with decays of features and in the delta form, "
            "got 192 and 64",
        ),
    ],
)
def test_refused_arguments(options, message):
    with pytest.raises(NotImplementedError, match=message):
        call(**options, implementation="mosaic_gpu")


def test_it_runs_only_if_it_is_named():
    """These kernels have not run on a GPU yet."""
    assert kernels_of(lambda: call(implementation="pallas")) == {TRITON}
    assert kernels_of(lambda: call(implementation=("mosaic_gpu", "xla"))) == {MOSAIC_GPU}
