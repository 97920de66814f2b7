"""Trapezoidal scan: the state space of Mamba-3, with a complex state by rotation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from effattn import registry
from effattn.arrays import checks, mesh_axes, state_spaces
from effattn.arrays.axes import lead
from effattn.cores import recurrence, sequence_parts
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


class TrapezoidalState(NamedTuple):
    """State of `trapezoidal_scan`; zeros are the empty state.

    Attributes:
      sums: h, `(*B, K / R, F, P)`, keys by values.
      key: B of the last token, `(*B, K, F)`.
      value: x of the last token, `(*B, K, P)`.
    """

    sums: jax.Array
    key: jax.Array
    value: jax.Array


def naive(state, query, key, value, *, step_size, log_decay, trapezoid, angle, rank):
    """One token of one state: C and B `(R, F)` and x `(R, P)` in one axis, angle `(M,)`."""
    C, B, x = (array.reshape(rank, -1) for array in (query, key, value))
    B_before, x_before = (array.reshape(rank, -1) for array in (state.key, state.value))
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def turned(x):
        """Rotates M pairs of the first axis."""
        pairs = x[: 2 * angle.size].reshape(angle.size, 2, *x.shape[1:])
        turn = jnp.array([[cos, -sin], [sin, cos]])  # (2, 2, M)
        pairs = jnp.einsum("ijr,rj...->ri...", turn, pairs)
        return jnp.concatenate([lax.collapse(pairs, 0, 2), x[2 * angle.size :]])

    alpha, gamma = jnp.exp(log_decay), trapezoid * step_size
    beta = (1 - trapezoid) * step_size * alpha
    before = beta * turned(B_before.T) @ x_before
    sums = alpha * turned(state.sums) + before + gamma * B.T @ x
    return TrapezoidalState(sums, key, value), (C @ sums).ravel()


def _empty(key, value, rank, **_):
    sums = jnp.zeros((key.size // rank, value.size // rank), value.dtype)
    return TrapezoidalState(sums, key, value)


def _of_ranks(form: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the naive form of a state the R heads of query, key and value that share the state."""

    @functools.wraps(form)
    def call(*, query, key, value, rank, initial_state, **given):
        def folded(x):
            return x.reshape(*x.shape[:-2], x.shape[-2] // rank, rank * x.shape[-1])

        def unfolded(x):
            return x.reshape(*x.shape[:-2], x.shape[-2] * rank, x.shape[-1] // rank)

        def of_state(state, fold):
            return TrapezoidalState(state.sums, fold(state.key), fold(state.value))

        if initial_state is not None:
            initial_state = of_state(initial_state, folded)
        heads = dict(zip(("query", "key", "value"), map(folded, (query, key, value)), strict=True))
        result = form(**heads, rank=rank, initial_state=initial_state, **given)
        if given.get("return_state"):
            out, state = result
            return unfolded(out), of_state(state, unfolded)
        return unfolded(result)

    return call


_PER_TOKEN = ("step_size", "log_decay", "trapezoid", "angle")


@with_naive(_of_ranks(over_tokens(naive, per_token=_PER_TOKEN, empty=_empty)))
@declared
def trapezoidal_scan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    step_size: jax.Array,
    log_decay: jax.Array,
    trapezoid: jax.Array,
    angle: jax.Array,
    rank: int = 1,
    **options: Unpack[Recurrent],
) -> Any:
    r"""State space of Mamba-3 (Lahoti et al. 2026, "Mamba-3"), also with several inputs (MIMO).

    In the symbols of the paper, with the generalised trapezoidal rule,

        h_t = a_t R_t h_(t-1) + (1 - l_t) dt_t a_t R_t B_(t-1) x_(t-1)^T + l_t dt_t B_t x_t^T
        out_t = h_t^T C_t;    a_t = exp(dt_t A_t)

    R_t rotates pairs of features by `angle`: each pair is a complex number whose decay has this
    phase. With l = 1 and no angle it is `state_space_duality` of Mamba-2. It runs as a linear
    recurrence of rotated queries and keys in which a token writes the key before it. Always causal.

    With a `rank` of R, a state has R inputs and outputs: R consecutive heads of query, key and
    value share it. Each product B x^T is then a sum of R products, and each of the R queries reads
    the state. Time is O(T (c + F + R) P) a head for chunks of c / R tokens, memory O(T), and a
    state has F x P + R (F + P) numbers.

    Args:
      query: C, `(*B, T, N, F)`, with any number of batch dimensions; F is the state size.
      key: B, `(*B, T, K, F)`, N a multiple of K. There are K / R states, and query head n reads
        state n // (N R // K).
      value: x, `(*B, T, K, P)`.
      step_size: dt, `(*B, T, K / R)`, 0 or more, checked if concrete.
      log_decay: dt A, `(*B, T, K / R)`, 0 or less, checked if concrete.
      trapezoid: l, `(*B, T, K / R)`, in [0, 1], checked if concrete: the share of the
        present token.
      angle: `(*B, T, K / R, M)`, in radians, dt times the imaginary part of the rate; features 2 m
        and 2 m + 1 are a pair. M is at most F / 2, and features from 2 M on are not rotated.
      rank: R, heads of query, key and value that share a state; a divisor of K.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, P)` in the dtype of `value`; with `return_state`, `(out, TrapezoidalState)`, in
      the promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    checks.known_length("trapezoidal_scan", given.query)
    *shape, heads, size = given.key.shape
    if heads % checks.at_least("rank", rank, 1, "heads"):
        raise ValueError(
            f"rank must divide the {heads} heads of key and value, because rank heads share "
            f"a state, got {rank}"
        )
    shape = [*shape, heads // rank]
    log_decay = recurrence.check_log_decay(log_decay, tuple(shape))
    step_size = state_spaces.steps(step_size, tuple(shape))
    trapezoid = checks.shaped("trapezoid", trapezoid, tuple(shape))
    checks.between("trapezoid", trapezoid, 0, 1)
    pairs = angle.shape[-1] if angle.ndim else 0
    angle = checks.shaped("angle", angle, (*shape, pairs))
    if 2 * pairs > size:
        raise ValueError(
            f"angle must rotate at most {size // 2} pairs of the {size} features of a key, got "
            f"{pairs} angles"
        )
    first, tokens = _check_state(given, rank), given.tokens
    arrays = given.key, given.value, step_size, log_decay, trapezoid, angle
    arrays = jax.tree.map(lambda x: x.astype(given.dtype), clear(arrays, tokens.key_mask))
    query = clear(given.query, tokens.query_mask).astype(given.dtype)
    *axes, of_queries, _ = mesh_axes.spec(query)
    *_, of_keys, _ = mesh_axes.spec(given.key)
    per_query, per_key = PartitionSpec(*axes, of_queries), PartitionSpec(*axes, of_keys)
    per_row = PartitionSpec(*axes[:-1], of_keys)
    write = functools.partial(_written, rank)
    turned, written, ends = mesh_axes.placed(write, query, per_query, per_key, per_row)(
        query, arrays, first, tokens.key_mask, tokens.starts
    )
    out, sums = recurrence.run(
        "trapezoidal_scan",
        _terms,
        dataclasses.replace(
            given,
            initial_state=None if given.initial_state is None else first.sums,
            # Padding has no keys; after a document it writes the last key of the document.
            tokens=_tokens_of_steps(tokens._replace(key_mask=None), rank),
        ),
        turned,
        written,
    )
    finish = mesh_axes.placed(functools.partial(_finished, rank), query, per_query, per_row)
    steps = turned, *written[:2]
    out, state = finish(out, sums, query, steps, arrays, first, tokens.key_mask, ends)
    return recurrence.results(out.astype(given.value.dtype), state, given)


def _ranks(x, rank):
    """Heads `(..., K, F)` as the R heads of each state, `(..., K / R, R, F)`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // rank, rank, x.shape[-1])


def _in_order(x):
    """The R heads of states `(*B, T, S, R, F)` as steps of the recurrence, `(*B, T R, S, F)`."""
    x = jnp.moveaxis(x, -2, -3)
    return lax.collapse(x, x.ndim - 4, x.ndim - 2)


def _by_token(x, rank):
    """Inverse of `_in_order`."""
    x = x.reshape(*x.shape[:-3], x.shape[-3] // rank, rank, *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)


def _tokens_of_steps(tokens, rank):
    """The masks of the R steps of each token; a document starts in the first one."""
    steps = [None if x is None else jnp.repeat(x, rank, -1) for x in tokens]
    query_mask, key_mask, starts = steps
    if starts is not None:
        first = jnp.arange(starts.shape[-1]) % rank == 0
        starts = starts & lead(first, starts.ndim)
    return tokens._replace(query_mask=query_mask, key_mask=key_mask, starts=starts)


def _written(rank, query, arrays, first, mask, starts):
    """The rotated queries, what each step writes, and what the state needs of the last token."""
    key, value, step_size, log_decay, trapezoid, angle = arrays
    query, key, value, first_key, first_value = (
        _ranks(x, rank) for x in (query, key, value, first.key, first.value)
    )
    angle, total = _running(angle)
    present = trapezoid * step_size
    # A token writes the keys before it, whose weight depends on both tokens. The first token of a
    # document writes none.
    weight = jnp.exp(log_decay) * (_before(present, -2) + (1 - trapezoid) * step_size)
    if starts is not None:
        weight = clear(weight, ~starts)
    turned = _turned(key, -angle[..., None, :])
    # The first keys follow those of the state, also after padding.
    mask = jnp.ones(key.shape[:-3], bool) if mask is None else mask
    follows = _before(mask, -1)[..., None, None, None]
    last_key = jnp.where(follows, _before(turned, -4), first_key[..., None, :, :, :])
    last_value = jnp.where(follows, _before(value, -4), first_value[..., None, :, :, :])
    groups = query.shape[-3] // key.shape[-3]
    query = _turned(query, -jnp.repeat(angle, groups, -2)[..., None, :])
    ends = turned[..., -1:, :, :, :].sum(-4), present[..., -1:, :].sum(-2), total
    decays = jnp.stack([log_decay, *[jnp.zeros_like(log_decay)] * (rank - 1)], -1)
    written = weight[..., None, None] * last_key, last_value, decays[..., None]
    *steps, decays = map(_in_order, written)
    return _in_order(query), (*steps, decays[..., 0]), ends


def _finished(rank, out, sums, query, steps, arrays, first, mask, ends):
    """The output with what a token reads of itself, and the state after the last token."""
    key, value, step_size, _, trapezoid, _ = arrays
    of_state = value.shape[-2] // rank
    turned, written, last_value = (_by_token(x, rank) for x in steps)
    query, keys, values = (_ranks(x, rank) for x in (query, key, value))
    groups = query.shape[-3] // of_state
    present = jnp.repeat(trapezoid * step_size, groups, -1)[..., None]
    out = _by_token(out.astype(query.dtype), rank)
    for m in range(rank):

        def of_rank(x, m=m):
            """Head m of the state of each query, `(*B, T, N / R, 1, F)`."""
            return jnp.repeat(x[..., m : m + 1, :], groups, -3)

        products = present * (query * of_rank(keys)).sum(-1)
        out = out + products[..., None] * of_rank(values)
        if m:
            # The steps before step m of the token have not read the key before it.
            missed = (turned * of_rank(written)).sum(-1)
            missed = jnp.where(lead(jnp.arange(rank) < m, missed.ndim), missed, 0)
            out = out + missed[..., None] * of_rank(last_value)
    last_key, weight, total = ends
    last_value, parts = values[..., -1:, :, :, :].sum(-4), sequence_parts.current()
    if parts is not None:
        every = lax.all_gather((last_key, weight, last_value), parts.axis_name)
        last_key, weight, last_value = jax.tree.map(lambda x: x[-1], every)
    last_key = weight[..., None, None] * last_key
    sums = sums + (last_key[..., None] * last_value[..., None, :]).sum(-3)
    sums = jnp.swapaxes(_turned(jnp.swapaxes(sums, -1, -2), total[..., None, :]), -1, -2)
    last_key, last_value = _last(key, mask, first.key), _last(value, mask, first.value)
    out = out.reshape(*out.shape[:-3], out.shape[-3] * rank, out.shape[-1])
    return out, TrapezoidalState(sums, last_key, last_value)


def _terms(_, query, keys) -> Terms:
    key, value, log_decay = keys
    return Terms(query, key, value, log_decay=log_decay)


def _check_state(given, rank):
    """The initial state, of the dtype of sums; zeros if there is none."""
    state, (*batch, _, heads, size) = given.initial_state, given.key.shape
    values = given.value.shape[-1]
    shapes = (heads // rank, size, values), (heads, size), (heads, values)
    if state is None:
        return TrapezoidalState(*(jnp.zeros((*batch, *shape), given.dtype) for shape in shapes))
    if not isinstance(state, TrapezoidalState):
        raise ValueError(
            "initial_state must be the TrapezoidalState that an earlier call returned, got "
            f"{type(state).__name__}"
        )
    return TrapezoidalState(
        *(
            checks.shaped(f"initial_state.{name}", x, (*batch, *shape)).astype(given.dtype)
            for name, x, shape in zip(state._fields, state, shapes, strict=True)
        )
    )


def _turned(x, angle):
    """Rotates the pairs `(..., 2 m)` and `(..., 2 m + 1)` of x `(..., F)` by angles `(..., M)`."""
    count = 2 * angle.shape[-1]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., 0:count:2], x[..., 1:count:2]
    turned = jnp.stack([cos * first - sin * second, sin * first + cos * second], -1)
    return jnp.concatenate([turned.reshape(*turned.shape[:-2], count), x[..., count:]], -1)


def _running(angle):
    """Sums of angles `(*B, T, S, M)` up to each token, and of the whole sequence, `(*B, S, M)`."""
    sums = _sums(angle)
    total, parts = sums[..., -1:, :, :].sum(-3), sequence_parts.current()
    if parts is None:
        return sums, total
    every = lax.all_gather(total, parts.axis_name)
    is_before = jnp.arange(len(every)) < parts.index
    before = jnp.where(is_before.reshape(-1, *(1,) * total.ndim), every, 0).sum(0)
    return sums + before[..., None, :, :], every.sum(0)


@jax.custom_jvp
def _sums(angle):
    """Running sums of angles `(*B, T, S, M)`, without whole turns in float32.

    A float32 sum of many angles has a large error. As 32-bit fixed-point fractions of a turn, the
    angles are added without rounding, and the overflow drops whole turns.
    """
    axis = angle.ndim - 3
    if angle.dtype != jnp.float32:
        return jnp.cumsum(angle, axis)
    turns = angle / (2 * np.pi)
    fixed = 2 * (2.0**31 * (turns - jnp.round(turns))).astype(jnp.int32)
    sums = jnp.cumsum(fixed, axis, dtype=jnp.int32)
    return sums.astype(angle.dtype) * (2 * np.pi / 2.0**32)


@_sums.defjvp
def _sums_jvp(primals, tangents):
    (angle,), (tangent,) = primals, tangents
    return _sums(angle), jnp.cumsum(tangent, angle.ndim - 3)


def _before(x, axis):
    """The entries of the token before each token; zeros before the first one."""
    rows = jnp.moveaxis(x, axis, 0)[None]
    return jnp.moveaxis(sequence_parts.with_tokens_before(rows, 1)[0, :-1], 0, axis)


def _last(x, mask, first):
    """The entries `(*B, K, F)` of the last valid token; `first` if there is none."""
    if mask is None:
        mask = jnp.ones(x.shape[:-2], bool)
    token = jnp.where(mask, jnp.arange(mask.shape[-1]), -1)
    place = jnp.max(token, -1, keepdims=True, initial=-1)
    # A sum, as a gather would gather the rows of all devices.
    last = clear(x, mask & (token == place)).sum(-3)
    every = [((place >= 0)[..., None], last)]
    parts = sequence_parts.current()
    if parts is not None:
        every = list(zip(*lax.all_gather(every[0], parts.axis_name), strict=True))
    for found, last in every:
        first = jnp.where(found, last, first)
    return first


registry.register(
    registry.Mechanism(
        name="mamba3",
        family="recurrent",
        paper="Lahoti et al. 2026, Mamba-3: Improved Sequence Modeling using State Space "
        "Principles",
        function=trapezoidal_scan,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mamba3:Mamba3",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N F P)",
        time_exponent=1.0,
        knows_order=True,
    )
)
