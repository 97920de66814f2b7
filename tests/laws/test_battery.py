"""The battery itself, on a mechanism that is always causal and takes arrays of its own.

A linear attention that forgets by a learned rate a head and by what each token says, as a plain
scan over tokens, whose state is a pair. It is registered for this test alone.
"""

import jax
import jax.numpy as jnp
import pytest

from effattn import registry
from tests.laws import (
    test_capabilities,
    test_causality,
    test_cost,
    test_decode,
    test_determinism,
    test_extremes,
    test_padding,
    test_reference,
    test_sharding,
    test_transformations,
)
from tests.laws.battery import SQUARE, Subject, everything
from tests.references import REFERENCES
from tests.references.reference import Reference


def phi(x):
    return jax.nn.elu(x) + 1


def ratio(numerator, denominator):
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


def forgetting_attention(
    query,
    key,
    value,
    *,
    log_decay,
    log_rate,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    segment_ids=None,
    initial_state=None,
    return_state=False,
):
    """`log_decay (*B, T, K)`, `log_rate (K,)`; the state is `(sum k v^T, sum k)`, decayed."""
    length, dtype = key.shape[-3], jnp.promote_types(jnp.result_type(query, value), jnp.float32)
    ids = jnp.ones_like(key.sum((-1, -2)), int) if segment_ids is None else jnp.asarray(segment_ids)

    def within(lengths):
        token = jax.lax.broadcasted_iota(jnp.int32, (*ids.shape[:-1], length), ids.ndim - 1)
        return (ids != 0) if lengths is None else (ids != 0) & (token < lengths[..., None])

    def clear(x, present):
        return jnp.where(present.reshape(*present.shape, *(1,) * (x.ndim - present.ndim)), x, 0)

    valid, present = within(query_seq_lengths), within(key_value_seq_lengths)
    log_rate = jnp.broadcast_to(log_rate.astype(dtype), log_decay.shape)
    decay = jnp.exp(clear(log_decay.astype(dtype) + log_rate, present))
    q, k = (
        clear(phi(clear(x, at).astype(dtype)), at) for x, at in ((query, valid), (key, present))
    )
    v = clear(value, present).astype(dtype)
    if initial_state is None:
        initial_state = jnp.zeros_like(k[..., 0, :, :, None] * v[..., 0, :, None, :])
        initial_state = initial_state, jnp.zeros_like(k[..., 0, :, :])
    first = jnp.take_along_axis(ids, jnp.argmax(ids != 0, -1)[..., None], -1)[..., 0]

    def step(carry, token):
        (sums, total), document = carry
        q, k, v, decay, id, valid, present = token
        decay = jnp.where((present & (id != document))[..., None], 0, decay)
        sums = decay[..., None, None] * sums + k[..., :, None] * v[..., None, :]
        total = decay[..., None] * total + k
        document = jnp.where(present, id, document)
        q = jnp.where((valid & (id == document))[..., None, None], q, 0)
        q = q.reshape(*k.shape[:-1], -1, k.shape[-1])
        out = ratio(
            jnp.einsum("...kgf,...kfd->...kgd", q, sums),
            jnp.einsum("...kgf,...kf->...kg", q, total)[..., None],
        )
        return ((sums, total), document), out

    tokens = [jnp.moveaxis(x, len(ids.shape) - 1, 0) for x in (q, k, v, decay, ids, valid, present)]
    (state, _), out = jax.lax.scan(step, (initial_state, first), tokens)
    out = jnp.moveaxis(out, 0, len(ids.shape) - 1).reshape(*query.shape[:-1], v.shape[-1])
    out = out.astype(value.dtype)
    return (out, state) if return_state else out


def forgetting(arrays, pairs, keep, **_):
    """With all its pairs, each decayed by what lies between them."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    dtype = jnp.promote_types(jnp.result_type(query, value), jnp.float32)
    q, k, v = phi(query.astype(dtype)), phi(key.astype(dtype)), value.astype(dtype)
    log_decay = arrays["log_decay"].astype(dtype) + arrays["log_rate"].astype(dtype)
    so_far = jnp.cumsum(jnp.where(pairs.present[..., None], log_decay, 0), -2)  # (*B, T, K)
    heads = jnp.arange(query.shape[-2]) // (query.shape[-2] // key.shape[-2])

    def decay(logarithm, where):
        return jnp.exp(jnp.where(where[..., None], logarithm, -jnp.inf))

    between = decay(so_far[..., :, None, :] - so_far[..., None, :, :], pairs.allowed)
    weights = jnp.einsum("...tnf,...snf,...tsn->...nts", q, k[..., heads, :], between[..., heads])
    numerator = jnp.einsum("...nts,...snd->...tnd", weights, v[..., heads, :])
    denominator = jnp.moveaxis(weights.sum(-1), -2, -1)
    k = k * decay(so_far[..., -1:, :] - so_far, pairs.reaches_final)[..., None]
    state = jnp.einsum("...skf,...skd->...kfd", k, v), k.sum(-3)
    if "initial_state" in arrays:
        sums, total = (x.astype(dtype) for x in arrays["initial_state"])
        q = q * decay(so_far, pairs.reads_initial)[..., heads, None]
        numerator = numerator + jnp.einsum("...tnf,...nfd->...tnd", q, sums[..., heads, :, :])
        denominator = denominator + jnp.einsum("...tnf,...nf->...tn", q, total[..., heads, :])
        kept = decay(so_far[..., -1, :], pairs.keeps_initial)
        state = state[0] + kept[..., None, None] * sums, state[1] + kept[..., None] * total
    return {"out": ratio(numerator, denominator[..., None]).astype(value.dtype), "state": state}


FORGETTING = registry.Mechanism(
    name="forgetting",
    family="linear",
    paper="",
    function=forgetting_attention,
    capabilities=frozenset({"causal", "grouped", "lengths", "segments", "state"}),
    decoder="effattn.decode.recurrent:RecurrentDecoder",
    complexity="O(N H Hv)",
    time_exponent=1.0,
)


def arguments(rng, sizes):
    shape = (*sizes.batch, sizes.keys, sizes.key_heads)
    return {
        "log_decay": -rng.uniform(0, 1, size=shape),
        "log_rate": -rng.uniform(0, 1, size=sizes.key_heads),
    }


REFERENCE = Reference(
    attend=forgetting,
    variants={"": {}},
    tuning={},
    arguments=arguments,
    per_token=frozenset({"log_decay"}),
    per_head=frozenset({"log_rate"}),
    decays=frozenset({"log_decay", "log_rate"}),
    initial_state=lambda rng, shapes: tuple(rng.uniform(0.1, 1, size=x.shape) for x in shapes),
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(registry._MECHANISMS, FORGETTING.name, FORGETTING)
    monkeypatch.setitem(REFERENCES, FORGETTING.name, REFERENCE)
    return Subject(FORGETTING.name, "")


@pytest.mark.slow
@pytest.mark.devices
def test_the_laws_hold_for_it(registered):
    """One after another, so that they share their programs."""
    subject = registered
    test_reference.test_float64_agrees(subject, SQUARE, everything(subject))
    test_reference.test_float32_errs_at_most_twice_as_much_as_the_plain_form(subject)
    test_reference.test_bfloat16_errs_at_most_twice_as_much_as_the_plain_form(subject)
    test_causality.test_a_token_changes_nothing_before_it(subject)
    test_causality.test_the_jacobian_is_block_lower_triangular(subject)
    test_decode.test_any_split_of_what_each_token_has_equals_the_whole(subject)
    test_determinism.test_twice_the_same(subject)
    for extreme in test_extremes.EXTREMES:
        test_extremes.test_extreme_values(subject, extreme)
    test_extremes.test_extreme_decays(subject, 0.0)
    test_extremes.test_extreme_decays(subject, -1e4)
    test_extremes.test_equal_keys_share_their_weight(subject)
    test_extremes.test_nothing_is_left_after_padding(subject)
    test_extremes.test_one_token(subject)
    test_padding.test_what_is_in_padding_reaches_nothing(subject)
    test_padding.test_packed_documents_give_what_they_give_alone(subject)
    test_padding.test_an_example_does_not_depend_on_the_others(subject)
    test_transformations.test_vmap_over_any_argument(subject)
    test_sharding.test_only_the_gradients_of_what_is_shared_are_summed(subject)
    test_sharding.test_batch_and_heads_need_no_collective(subject)
    test_sharding.test_shard_map_remat_and_scan(subject)
    test_cost.test_operations_grow_as_claimed_and_programs_do_not(subject, "causal")
    test_capabilities.test_a_module_gives_advice_on_what_is_not_claimed(subject)
    for capability in test_capabilities.SHOWN_BY_ARGUMENTS:
        test_capabilities.test_a_signature_has_what_is_claimed_and_nothing_else(subject, capability)
    for batch, narrow in test_capabilities.BATCHES:
        test_capabilities.test_any_number_of_batch_dimensions_and_mixed_dtypes(
            subject, batch, narrow
        )
    test_capabilities.test_float32_stays_float32_where_float64_is_enabled(subject)
