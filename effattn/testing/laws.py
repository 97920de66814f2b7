"""The laws: what holds for every mechanism, each as a function of a subject.

A law raises `AssertionError` if it is broken. `LAWS` lists the laws in order, each with the
subjects that it applies to.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from effattn.testing import functions
from effattn.testing.functions import assert_close
from effattn.testing.subjects import OfFunction, OfMixer, Subject, filled

MOST = 4  # tokens in a piece of a decoded sequence

LAWS: dict[str, tuple[Callable[[Any], None], Callable[[Any], bool]]] = {}


def law(applies: Callable[[Any], bool] = lambda subject: True) -> Callable[..., Any]:
    """Decorator: adds a law, for the subjects that `applies` selects."""

    def add(function):
        LAWS[function.__name__] = function, applies
        return function

    return add


def claims(*capabilities: str) -> Callable[[Any], bool]:
    """Selects the subjects with all these capabilities."""
    return lambda subject: all(map(subject.has, capabilities))


def is_causal(subject: Subject) -> bool:
    """Selects causal subjects."""
    return subject.is_causal


def decodes(subject: Subject) -> bool:
    """Selects subjects whose mixer decodes."""
    return subject.is_causal and subject.has("decode") and subject.has_mixer


def rms(x: Any) -> float:
    """Root mean square of the finite entries."""
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean(np.square(x[np.isfinite(x)]))))


def draws(examples: int) -> Callable[..., Any]:
    """Hypothesis settings: number of draws, the same in each run; failures are not minimised."""
    phases = (Phase.explicit, Phase.generate)  # each smaller example would cost a compilation
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


@law()
def agrees_with_the_naive_form(subject: Subject) -> None:
    """Outputs, log-sum-exps, states and all gradients, in float64.

    With all claimed options except dropout and soft cap, which the next law has.
    """
    known = st.just(subject.neutral()) if isinstance(subject, OfMixer) else subject.known()

    @draws(8)
    @given(known, st.integers(0, 99))
    def holds(known, seed):
        arrays = subject.wide(seed)
        cotangents = subject.cotangents_wide(arrays, known)
        ours = subject.run_wide(arrays, known, cotangents)
        expected = subject.run_naive(arrays, known, cotangents)
        for path, gradient in jax.tree.leaves_with_path(expected[1].get("mixer")):
            drawn = any(name in jax.tree_util.keystr(path) for name in subject.case.drawn)
            assert np.any(gradient) != drawn, path
        assert_close(ours, expected, subject.tolerance, subject.least)

    with jax.enable_x64(True):
        holds()


def has_more_options(subject: Subject) -> bool:
    """Selects functions that `agrees_with_the_naive_form` does not show in full."""
    more = ("bidirectional", "dropout", "soft_cap", "score_mod")
    return isinstance(subject, OfFunction) and any(map(subject.has, more))


@law(has_more_options)
def agrees_with_the_naive_form_with_every_option(subject: OfFunction) -> None:
    """Bidirectional calls if claimed, of unequal lengths if claimed, with dropout and soft cap."""
    of_function = subject.subject
    is_causal = not subject.has("bidirectional")
    is_cross = subject.has("cross") and of_function.variant not in subject.case.self_attention
    sizes = functions.CROSS if is_cross else functions.SQUARE
    extent = functions.Extent(is_causal, everything=True, simple=False, tuning=False)
    agrees(of_function, sizes, extent)


def agrees(subject: functions.Subject, sizes: functions.Sizes, extent: functions.Extent) -> None:
    """A function equals its naive form, with all gradients, in float64."""

    @draws(8)
    @given(functions.draw_known(subject, sizes, extent), st.integers(0, 99))
    def holds(known, seed):
        arrays = functions.draw_arrays(subject, sizes, extent.everything, seed)
        cotangents = functions.cotangents_of(subject, extent, arrays, known)
        ours = functions.program(subject, extent)(arrays, known, cotangents)
        expected = functions.run_naive(subject, sizes, extent, arrays, known, cotangents)
        assert_close(ours, expected, 1e-12)

    with jax.enable_x64(True):
        holds()


@law(is_causal)
def nothing_reaches_back(subject: Subject) -> None:
    """A token changes no earlier output, and a gradient of an output reaches no later token.

    Bit for bit; to 1e-5 of the RMS for mechanisms whose order of summation depends on later tokens.
    """
    arrays, cotangents = subject.single(0), subject.cotangents_single()
    results, whole = subject.run_single(arrays)
    exact, time = subject.entry.causality == "exact", np.arange(subject.length)

    def allowed(x):
        return 0 if exact else 1e-5 * rms(x)

    @draws(6)
    @given(st.integers(1, subject.length - 1), st.integers(1, 99))
    @example(1, 3)
    @example(subject.length - 1, 3)
    def holds(token, seed):
        other = subject.single(seed)
        later = {n: _where(time < token, arrays[n], other[n]) for n in subject.tokens}
        cut = {
            name: jax.tree.map(np.zeros_like, x)
            if name == "state"
            else _where(time < token, x, np.zeros_like(x))
            for name, x in cotangents.items()
        }
        after, gradients = subject.run_single({**arrays, **later}, cut)
        for name in results.keys() - {"state"}:
            change = np.abs(after[name] - results[name])
            assert change[:, :token].max() <= allowed(results[name])
            # Every output of a mixer reads its own token.
            first = slice(token, token + 1 if isinstance(subject, OfMixer) else None)
            assert (change[:, first] != 0).any()
        for name in subject.tokens:
            size = whole[name] if isinstance(subject, OfMixer) else gradients[name]
            assert np.abs(gradients[name][:, token:]).max() <= allowed(size)
            # The weight of a single key may be constant. A decay of the first token acts on
            # nothing, and an output may read the state as it was before its token, which the decay
            # of that token has not changed.
            if token > 2 + (name in subject.case.acts_late) or name in ("value", "x"):
                assert (gradients[name][:, :token] != 0).any()

    holds()


@law(claims("lengths"))
def padding_reaches_nothing(subject: Subject) -> None:
    """NaN in the padding gives, bit for bit, what zeros give there; outputs there are zero."""

    @draws(8)
    @given(subject.known(), st.integers(0, 99))
    def holds(known, seed):
        arrays = subject.wide(seed)
        cotangents = subject.cotangents_wide(arrays, known)
        present = subject.present(known)

        def run(value):
            fill = {n: _filled(kept, arrays[n], value) for n, kept in present.items()}
            return subject.run_wide({**arrays, **fill}, known, cotangents)

        results, gradients = with_nan = run(np.nan)
        jax.tree.map(np.testing.assert_array_equal, with_nan, run(0.0))
        for name, kept in present.items():
            assert (gradients[name][~kept] == 0).all()
        valid = next(iter(present.values())) if "query" not in present else present["query"]
        assert (results["out"][~valid] == 0).all()
        if "lse" in results:
            assert (results["lse"][~valid] == -np.inf).all()
            results = {**results, "lse": results["lse"][results["lse"] != -np.inf]}
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))

    with jax.enable_x64(True):
        holds()


@law(claims("segments", "lengths"))
def packed_documents_give_what_they_give_alone(subject: Subject) -> None:
    """The first row packs two documents; the next two rows hold one of them each."""
    length = subject.length

    @draws(4)
    @given(st.integers(1, length - 2), st.integers(1, length - 1), st.integers(0, 99))
    def holds(border, rest, seed):
        end = min(border + rest, length)
        documents = {1: slice(0, border), 2: slice(border, end)}
        arrays, known = subject.without_shared(subject.wide(seed)), subject.neutral()
        known["segment_ids"][0] = np.where(np.arange(length) < border, 7, 3)
        known["segment_ids"][0, end:] = 0
        for name in subject.tokens:
            arrays[name] = np.array(arrays[name])
        for row, document in documents.items():
            size = document.stop - document.start
            subject.padded(known, row, size)
            for name in subject.tokens:
                arrays[name][row] = np.nan
                arrays[name][row, :size] = arrays[name][0, document]
        cotangents = subject.cotangents_wide(arrays, known)
        for name, x in cotangents.items():
            for row, document in documents.items():
                if name != "state":
                    x[row, : document.stop - document.start] = x[0, document]
        for x in jax.tree.leaves(cotangents.get("state")):
            x[1], x[2] = 0, x[0]
        results, gradients = subject.run_wide(arrays, known, cotangents)
        state = results.pop("state", None)
        for row, document in documents.items():
            for x in [*results.values(), *(gradients[name] for name in subject.tokens)]:
                whole, part = x[0, document], x[row, : document.stop - document.start]
                tolerance = subject.packed_tolerance
                np.testing.assert_allclose(part, whole, tolerance, tolerance)
        for x in jax.tree.leaves(state):
            np.testing.assert_allclose(x[2], x[0], rtol=1e-12)

    with jax.enable_x64(True):
        holds()


@law(lambda subject: isinstance(subject, OfMixer) and subject.has("lengths"))
def padded_rows_give_what_they_give_alone(subject: OfMixer) -> None:
    """A mixer's padded rows equal its naive form on the valid tokens, with all gradients."""
    known, size = subject.neutral(), 7
    known["lengths"][:] = size
    with jax.enable_x64(True):
        arrays = subject.wide(0)
        cotangents = subject.cotangents_wide(arrays, known)
        results, gradients = subject.run_wide(arrays, known, cotangents)
        first = {**arrays, "x": arrays["x"][:, :size]}
        alone, of_alone = subject.run_naive(first, known, {"out": cotangents["out"][:, :size]})
        ours = results["out"][:, :size], {**gradients, "x": gradients["x"][:, :size]}
        assert_close(ours, (alone["out"], of_alone), subject.tolerance, subject.least)


@law(claims("lengths"))
def nothing_is_left_after_padding(subject: Subject) -> None:
    """Rows of length zero, full of NaN, give zeros, zero gradients, and the initial state."""
    with jax.enable_x64(True):
        arrays, known = subject.wide(0), subject.neutral()
        arrays.update({n: np.full_like(arrays[n], np.nan) for n in subject.tokens})
        for row in range(subject.rows):
            subject.padded(known, row, 0)
        cotangents = subject.cotangents_wide(arrays, known)
        results, gradients = subject.run_wide(arrays, known, cotangents)
    assert (results["out"] == 0).all()
    assert np.all(results.get("lse", -np.inf) == -np.inf)
    if "state" in results:
        same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        same(results["state"], arrays["initial_state"])
        same(gradients.pop("initial_state"), cotangents["state"])
    for gradient in jax.tree.leaves(gradients):
        assert (gradient == 0).all()


@law()
def an_example_does_not_depend_on_the_others(subject: Subject) -> None:
    """Bit for bit, forward and backward, even if the other examples are NaN."""
    arrays = subject.single(0)

    def run(arrays):
        results, gradients = subject.run_single(arrays)
        return results, {name: gradients[name] for name in subject.tokens}

    expected = run(arrays)
    for row in range(subject.rows):
        kept = np.arange(subject.rows) == row
        alone = {name: _filled(kept, arrays[name], np.nan) for name in subject.tokens}
        got = run({**arrays, **alone})
        of_row = [jax.tree.map(lambda x: x[row], tree) for tree in (got, expected)]  # noqa: B023
        chex.assert_trees_all_equal(*of_row)


@law(lambda subject: isinstance(subject, OfFunction) and not subject.case.mixes_queries)
def a_query_that_is_nan_reaches_its_own_output_alone(subject: OfFunction) -> None:
    """Bit for bit."""
    arrays = subject.single(0)
    expected = subject.run_single(arrays)[0]["out"]
    arrays["query"][:, 5] = np.nan
    out = subject.run_single(arrays)[0]["out"]
    others = np.arange(subject.length) != 5
    np.testing.assert_array_equal(out[:, others], expected[:, others])
    assert np.isnan(out[:, 5]).all()


@law()
def one_token_is_enough(subject: Subject) -> None:
    """Results and gradients of a sequence of one token, or of one valid token, are finite."""
    if isinstance(subject, OfMixer):
        with jax.enable_x64(True):
            arrays = subject.wide(0)
            arrays["x"] = arrays["x"][:, :1]
            cotangents = {"out": np.ones_like(arrays["x"])}
            ours = subject.run_wide(arrays, {}, cotangents)
            assert_close(
                ours, subject.run_naive(arrays, {}, cotangents), subject.tolerance, subject.least
            )
        return
    arrays, least = subject.single(0), subject.subject.least_tokens
    arrays.update({name: arrays[name][:, :least] for name in subject.tokens})
    one = np.ones(subject.rows, np.int32)
    known = {"query_seq_lengths": one, "key_value_seq_lengths": one} if least > 1 else {}
    extent = functions.plain(subject.subject)._replace(tuning=False)

    def total(arrays):
        results = functions.call(subject.subject, extent, arrays, known)
        if known and "lse" in results:
            results["lse"] = results["lse"][:, 0]
        return sum(map(jnp.sum, jax.tree.leaves(results)))

    found = jax.jit(jax.value_and_grad(total))(arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@law()
def extreme_values_stay_finite(subject: Subject) -> None:
    """Results and gradients, in float32."""
    for label, arrays in subject.extremes().items():
        for path, x in jax.tree.leaves_with_path(subject.run_single(arrays)):
            assert np.isfinite(x).all(), (label, jax.tree_util.keystr(path))


@law(lambda subject: isinstance(subject, OfFunction) and subject.is_normalized)
def equal_keys_share_their_weight(subject: Subject) -> None:
    """With equal keys and equal values, the output is that value."""
    results, _ = subject.run_single(filled(subject.single(0), query=1.0, key=1.0, value=3.0))
    np.testing.assert_allclose(results["out"], 3.0, rtol=1e-6)


@law()
def twice_the_same(subject: Subject) -> None:
    """The same call gives the same bits, forward and backward, without options and with all."""
    arrays = subject.single(0)
    first, second = (subject.run_single(arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    with jax.enable_x64(True):
        arrays, known = subject.wide(0), subject.neutral()
        cotangents = subject.cotangents_wide(arrays, known)
        first, second = (subject.run_wide(arrays, known, cotangents) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@law(decodes)
def any_split_equals_the_whole(subject: Subject) -> None:
    """A mixer extended by pieces of 0 to 4 tokens, unequal between rows, equals one call.

    The padding of a piece is NaN.
    """
    mixer, rows = subject.mixer, 2
    x = np.random.default_rng(0).normal(size=(rows, subject.length, subject.features))
    x = x.astype(np.float32)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def begin(m, x):
        empty = m.init_state(rows, subject.length, jnp.float32)
        return m(x), empty, m.step(x[:, :1], empty)

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def extend(m, x, state, lengths):
        return m.extend(x, state, lengths=lengths)

    whole, empty, (y, state) = begin(mixer, x)
    tolerance: Any = subject.decode_tolerance
    np.testing.assert_allclose(y, whole[:, :1], **tolerance)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state, empty)
    assert all(jax.tree.leaves(same))
    splits_equal(whole, x, empty, functools.partial(extend, mixer), **tolerance)


@law(lambda subject: isinstance(subject, OfFunction) and bool(subject.subject.per_token))
def any_split_of_own_tokens_equals_the_whole(subject: OfFunction) -> None:
    """A decoder extended by pieces of query, key, value and the own arrays of each token."""
    arrays, rows = subject.single(0), 2
    tokens = {name: arrays[name][:rows] for name in subject.tokens}
    whole = subject.run_single(arrays)[0]["out"][:rows]
    decoder = functions.decoder_of(subject.subject, arrays)
    sizes = functions.SQUARE.key_heads, functions.SQUARE.size, functions.SQUARE.value_size
    first = {name: tokens[name][:, :1] for name in subject.subject.per_token}
    empty = decoder.init(rows, subject.length, *sizes, jnp.float32, **first)

    @jax.jit
    def extend(tokens, state, lengths):
        return decoder.extend(**tokens, state=state, lengths=lengths)

    splits_equal(whole, tokens, empty, extend, **subject.decode_tolerance)


def splits_equal(
    whole: Any, tokens: Any, empty: Any, extend: Callable[..., Any], *, rtol: float, atol: float
) -> None:
    """Extends from an empty state by random pieces, and compares with the output of one call.

    Args:
      whole: `(R, L, ...)`, the output of one call.
      tokens: pytree of `(R, L, ...)`.
      empty: the empty state.
      extend: `(tokens, state, lengths) -> (output, state)` for pieces of `MOST` tokens.
      rtol: relative tolerance, as in `numpy.testing.assert_allclose`.
      atol: absolute tolerance.
    """
    whole = np.asarray(whole)
    rows, length = whole.shape[:2]
    sizes = st.lists(st.integers(0, MOST), min_size=rows, max_size=rows)

    @draws(6)
    @given(st.lists(sizes, max_size=12))
    def holds(pieces):
        state, at = empty, np.zeros(rows, int)
        # After the random pieces, single steps and whole pieces finish the sequence.
        for piece in [*pieces, *[[1, MOST]] * length]:
            lengths = np.minimum(piece, length - at).astype(np.int32)
            if not lengths.any():
                continue
            parts = list(zip(at, lengths, strict=True))

            def piece_of(x, parts=parts):
                padded = np.full((rows, MOST, *x.shape[2:]), np.nan, np.float32)
                for row, (start, size) in enumerate(parts):
                    padded[row, :size] = x[row, start : start + size]
                return padded

            y, state = extend(jax.tree.map(piece_of, tokens), state, lengths)
            for row, (start, size) in enumerate(parts):
                expected = whole[row, start : start + size]
                np.testing.assert_allclose(np.asarray(y)[row, :size], expected, rtol, atol)
            at = at + lengths
            np.testing.assert_array_equal(state.length, at)

    holds()


@law(decodes)
def rows_of_a_state_can_be_chosen(subject: Subject) -> None:
    """Rows of a state can be repeated, reordered and dropped, as beam search does.

    There are as many rows as features of a token, so that no other axis passes for that of rows.
    """
    count = subject.features
    tokens = subject.length if isinstance(subject, OfMixer) else 6
    x = np.random.default_rng(0).normal(size=(count, tokens, count)).astype(np.float32)
    rows_can_be_chosen(subject.mixer, x)


def rows_first(init_state: Callable[[int], Any]) -> None:
    """Every array of a state has the rows as its first axis."""
    for rows in (3, 5):
        state = jax.eval_shape(functools.partial(init_state, rows))
        assert {leaf.shape[:1] for leaf in jax.tree.leaves(state)} == {(rows,)}


def rows_can_be_chosen(mixer: Any, x: np.ndarray) -> None:
    """Rows of x, of unequal lengths, decode alike after their states were moved."""
    count, prompt = len(x), x.shape[1] - 1
    rows_first(lambda rows: mixer.init_state(rows, prompt + 1, jnp.float32))
    lengths = np.arange(count) % prompt + 1

    @jax.jit
    def continued(mixer, x, lengths, rows):
        state = mixer.init_state(count, prompt + 1, jnp.float32)
        _, state = mixer.extend(x[:, :prompt], state, lengths=lengths)
        return mixer.step(x[rows, prompt:], jax.tree.map(lambda a: a[rows], state))

    # Every row in the place of another, two of them twice, and two dropped.
    rows = np.array([3, 0, 0, *range(4, count), 1, 1])[:count]
    moved = continued(mixer, x, lengths, rows)
    alone = continued(mixer, x[rows], lengths[rows], np.arange(count))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), moved, alone)


def _where(kept, array, other):
    """Takes the tokens `(T,)` that are kept from one array `(B, T, ...)`, the rest from another."""
    return np.where(kept.reshape(-1, *[1] * (array.ndim - 2)), array, other)


def _filled(kept, array, value):
    """The array, with a value in place of the rows or tokens that are not kept."""
    kept = kept.reshape(kept.shape + (1,) * (array.ndim - kept.ndim))
    return np.where(kept, array, np.asarray(value, array.dtype))
