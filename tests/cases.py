"""The inputs and options on which the laws test each mechanism."""

import functools
import math

import numpy as np

from effattn.nn import RotaryEmbedding
from effattn.testing import Case
from tests import mixes
from tests.arguments import (
    RANDOM_BLOCKS,
    after_five_tokens,
    after_keys,
    after_some_tokens,
    after_tokens,
    bounded_erasing,
    bounded_rates,
    bounded_steps,
    bounded_strengths,
    erased_and_written,
    exponential_gates,
    faded,
    forget_gates,
    in_float32,
    inner_model,
    normal,
    positive,
    projections,
    reflections,
    removals,
    softplus,
    strengths,
    strengths_and_decays,
    strengths_and_decays_of_features,
    strengths_and_decays_of_steps,
    tokens,
    turns,
    two_halves,
)

Tiled = functools.partial(Case, tuning={"tile": (5, 4)})
ByRows = functools.partial(Case, tuning={"query_tile": 5})
Chunked = functools.partial(Case, tuning={"chunk_size": 3})
# Feature-map attention has a state in bidirectional calls too, but not with packed documents.
FeatureMapped = functools.partial(Chunked, state_and_segments=False)
Recurrent = functools.partial(Chunked, normalized=False)


NATIVE_SPARSE = {
    "compression_size": 4,
    "compression_stride": 2,
    "block_size": 4,
    "num_selected": 4,
    "window_size": 3,
}

# Mechanisms that take query, key and value.
FUNCTIONS = {
    "softmax": Tiled(),
    "additive": Tiled(
        arguments=lambda rng, sizes: {
            "query_kernel": rng.normal(size=(sizes.heads, sizes.size, 3)),
            "key_kernel": rng.normal(size=(sizes.heads, sizes.size, 3)),
            "score": rng.normal(size=(sizes.heads, 3)),
        },
    ),
    "sigmoid": Tiled(variants={"": {"logit_bias": -2.0}}, normalized=False),
    "squared_relu": Tiled(variants={"": {"divisor": 7.0}}, normalized=False),
    "forgetting": Tiled(
        arguments=lambda rng, sizes: {
            "log_forget": -rng.uniform(0, 1, (*sizes.batch, sizes.keys, sizes.heads))
        },
        decays=frozenset({"log_forget"}),
    ),
    "path": Chunked(arguments=reflections),
    "selective": Case(
        arguments=lambda rng, sizes: {
            name: rng.normal(size=(*sizes.batch, sizes.keys, 1, 3))
            for name in ("selection_query", "selection_key")
        },
        # The third token masks the second one for the fourth.
        acts_late=frozenset({"selection_query", "selection_key"}),
        tuning={"key_tile": 5},
    ),
    "differential": Tiled(arguments=two_halves, normalized=False),
    "entmax": ByRows(variants={"": {"alpha": 1.5}, "sparsemax": {"alpha": 2}}),
    "stick_breaking": ByRows(
        # Otherwise an output does not read its own value, as the laws expect.
        variants={"": {"attend_current": True}},
        normalized=False,
    ),
    "sliding_window": Tiled(variants={"": {"local_window_size": (3, 2)}}),
    "dilated": Tiled(variants={"": {"local_window_size": (2, 1), "dilation": 3}}),
    "longformer": Tiled(
        variants={"": {"local_window_size": (3, 2)}},
        masks={"global_mask": lambda length: {"max_global": length}},
    ),
    "streaming": Tiled(variants={"": {"num_sinks": 2, "window_size": 3}}),
    "adaptive_span": Tiled(
        variants={"": {"max_span": 6, "ramp": 3.0}},
        arguments=lambda rng, sizes: {"span": rng.uniform(0, 3, size=sizes.heads)},
    ),
    "sparse_transformer": Tiled(variants={"": {"stride": 4}}),
    "block_sparse": Case(
        variants={"": {"block_size": 3, "block_mask": lambda m, n: (m + 2 * n) % 3 != 1}},
        cross_and_segments=False,
    ),
    "bigbird": Case(
        variants={
            "": {
                "block_size": 3,
                "num_window_blocks": 1,
                "num_global_blocks": (1, 1),
                "random_blocks": RANDOM_BLOCKS,
            }
        },
        # The positions of the last blocks are known only when the whole sequence is known.
        decoding={"num_global_blocks": 1},
    ),
    "random": Case(variants={"": {"block_size": 3, "random_blocks": RANDOM_BLOCKS}}),
    "hierarchical": Tiled(
        variants={
            "": {"segment_size": 4, "num_levels": 1, "num_summaries": 2},
            "levels": {"segment_size": 2, "num_levels": 3, "num_summaries": 1},
        },
    ),
    "moba": Case(variants={"": {"block_size": 3, "top_k": 3}}),
    "learned_blocks": Case(
        variants={"": {"block_size": 3, "top_k": 3}},
        arguments=lambda rng, sizes: {
            name: rng.normal(size=tokens(sizes, 4)) for name in ("selection_query", "selection_key")
        },
    ),
    "sinkhorn": Tiled(
        variants={"": {"block_size": 4}, "cold": {"block_size": 5, "temperature": 0.2}},
        arguments=lambda rng, sizes: {
            "sort_projection": rng.normal(size=(sizes.key_heads, max(1, sizes.keys), sizes.size))
        },
        normalized=False,
        module={"max_length": 17, "block_size": 4},
    ),
    "native_sparse": Case(
        variants={"": NATIVE_SPARSE},
        arguments=lambda rng, sizes: {
            "gates": rng.uniform(0, 1, size=(*sizes.batch, sizes.queries, sizes.heads, 3))
        },
        normalized=False,
    ),
    "infini": Case(
        variants={
            "": {"segment_size": 4, "delta_rule": True, "rotary": faded},
            "linear": {"segment_size": 3},
        },
        arguments=lambda rng, sizes: {"gate": rng.normal(size=sizes.heads)},
        normalized=False,
        module={"segment_size": 4, "delta_rule": True},
    ),
    "linear": FeatureMapped(
        variants={name: {"feature_map": name or "elu"} for name in ("", "relu", "identity")},
        unnormalized=frozenset({"identity"}),
    ),
    "based": FeatureMapped(initial_state=after_tokens),
    "cosformer": FeatureMapped(variants={"": {"max_length": 17}}, arguments=positive),
    "hedgehog": FeatureMapped(
        arguments=lambda rng, sizes: {
            name: rng.normal(size=(sizes.key_heads, 4, sizes.size))
            for name in ("query_projection", "key_projection")
        },
    ),
    "performer": FeatureMapped(
        variants={"": {"kernel": "softmax"}},
        arguments=lambda rng, sizes: {
            "projection": rng.normal(size=(sizes.key_heads, 7, sizes.size))
        },
    ),
    "random_features": FeatureMapped(
        # The vectors are short, so that the sums of cosines stay away from zero.
        arguments=lambda rng, sizes: {
            "projection": rng.normal(size=(sizes.key_heads, 7, sizes.size)) / 3
        },
    ),
    "retention": Recurrent(
        arguments=lambda rng, sizes: {"log_decay": -rng.uniform(0, 1, size=sizes.key_heads)},
        decays=frozenset({"log_decay"}),
    ),
    "gated_linear": Recurrent(
        arguments=lambda rng, sizes: {
            "log_decay": -rng.uniform(0, 1, size=tokens(sizes, sizes.size))
        },
        decays=frozenset({"log_decay"}),
    ),
    "lightning": Recurrent(
        arguments=lambda rng, sizes: {"log_decay": -rng.uniform(0, 1, size=sizes.key_heads)},
        decays=frozenset({"log_decay"}),
    ),
    "hgrn2": Recurrent(arguments=forget_gates, decays=frozenset({"log_decay"})),
    "mlstm": Recurrent(arguments=exponential_gates, decays=frozenset({"log_forget_gate"})),
    "log_linear": Recurrent(
        arguments=lambda rng, sizes: {
            "log_decay": -rng.uniform(0, 1, size=tokens(sizes)),
            "levels": rng.uniform(0, 1, (*sizes.batch, sizes.queries, sizes.heads, 5)),
        },
        decays=frozenset({"log_decay"}),
        initial_state=after_five_tokens,
        module={"num_levels": 5},
    ),
    "gated_slot": Recurrent(
        arguments=lambda rng, sizes: {"log_decay": -rng.uniform(0, 1, size=tokens(sizes, 3))},
        decays=frozenset({"log_decay"}),
        module={"num_slots": 3},
        tuning={"chunk_size": 2},
    ),
    "rwkv6": Recurrent(
        arguments=lambda rng, sizes: {
            "log_decay": -rng.uniform(0, 1, size=tokens(sizes, sizes.size)),
            "bonus": rng.normal(size=(sizes.key_heads, sizes.size)),
        },
        decays=frozenset({"log_decay"}),
    ),
    "mamba2": Recurrent(
        arguments=lambda rng, sizes: {
            "step_size": softplus(rng.normal(size=tokens(sizes))),
            "rate": -rng.uniform(0.2, 1, size=sizes.key_heads),
        },
        decays=frozenset({"rate"}),
    ),
    # An angle is the imaginary part of the logarithm of a complex decay.
    "mamba3": Recurrent(
        arguments=turns,
        decays=frozenset({"log_decay", "angle"}),
        module={"mimo_rank": 2, "state_size": 4},
    ),
    "mamba": Recurrent(
        arguments=lambda rng, sizes: {
            "step_size": softplus(rng.normal(size=tokens(sizes, sizes.value_size))),
            "rate": -rng.uniform(0.2, 1, size=(sizes.key_heads, sizes.value_size, sizes.size)),
        },
        decays=frozenset({"rate"}),
    ),
    "delta_net": Recurrent(arguments=strengths, bounded=bounded_strengths),
    "gated_delta_net": Recurrent(
        arguments=strengths_and_decays,
        decays=frozenset({"log_decay"}),
        bounded=bounded_strengths,
    ),
    "delta_product": Recurrent(
        arguments=strengths_and_decays_of_steps,
        decays=frozenset({"log_decay"}),
        bounded=bounded_steps,
        tuning={"chunk_size": 8},
    ),
    "kimi_delta": Recurrent(
        arguments=strengths_and_decays_of_features,
        decays=frozenset({"log_decay"}),
        bounded=bounded_strengths,
    ),
    "gated_delta_net_2": Recurrent(
        arguments=erased_and_written,
        decays=frozenset({"log_decay"}),
        bounded=bounded_erasing,
    ),
    "mesa": Recurrent(
        # More steps than features, because rounding costs some.
        variants={"": {"num_steps": 12}},
        arguments=lambda rng, sizes: {
            **strengths_and_decays(rng, sizes),
            # With less, rounding errors grow: float32 then solves some equations to 2e-6 only.
            "regulariser": rng.uniform(1, 2, size=(sizes.key_heads, sizes.size)),
        },
        decays=frozenset({"log_decay"}),
        initial_state=after_keys,
    ),
    "titans": Case(
        variants={"": {"mini_batch_size": 4}},
        arguments=lambda rng, sizes: {
            "learning_rate": rng.uniform(0, 1, size=tokens(sizes)) / sizes.size,
            "momentum": rng.uniform(0, 1, size=tokens(sizes)),
            "log_decay": -rng.uniform(0, 1, size=tokens(sizes)),
        },
        decays=frozenset({"log_decay"}),
        initial_state=after_some_tokens,
        normalized=False,
        bounded=bounded_rates,
        module={"mini_batch_size": 4},
    ),
    "ttt_linear": Case(
        variants={"": {"mini_batch_size": 4}},
        arguments=inner_model,
        initial_state=after_some_tokens,
        normalized=False,
        module={"mini_batch_size": 4},
    ),
    "rwkv7": Recurrent(arguments=removals, decays=frozenset({"log_decay"})),
    "linformer": Tiled(
        variants={"": projections((7,), 17), "by head": projections((2, 6), 19)},
        unnormalized=frozenset({"by head"}),  # rows of 19 tokens, of which 17 are there
        cross_and_segments=False,
    ),
    "block_linformer": Tiled(
        variants={
            "": in_float32(projections((2,), 4)),
            "by head": in_float32(projections((2, 3), 5)),
        },
        module={"block_size": 4, "num_projected": 2},
    ),
    "long_short": Tiled(
        variants={
            "": {"window_size": 3, "segment_size": 4, "projection": normal(6, 2)},
            "scores": {"window_size": 4},
        },
        arguments={
            "": lambda rng, sizes: {},
            "scores": lambda rng, sizes: {"slot_scores": rng.normal(size=tokens(sizes, 3))},
        },
        module={"window_size": 3, "segment_size": 4, "num_projected": 2},
    ),
    "luna": FeatureMapped(
        variants={"": {"activation": "softmax"}, "elu": {"activation": "elu"}},
        arguments=lambda rng, sizes: {
            "pack_query": rng.normal(size=(sizes.key_heads, 3, sizes.size)),
            "pack_key": rng.normal(size=tokens(sizes, sizes.size)),
        },
        normalized=False,
        module={"num_packed": 3},
    ),
    "nystrom": Tiled(
        variants={
            "": {"num_landmarks": 4},
            "skip": {"num_landmarks": 3, "skip_kernel": normal(4, 5)},
            "more landmarks than queries": {"num_landmarks": 9},
        },
        self_attention=frozenset({"skip"}),
        unnormalized=frozenset({"skip"}),
        cross_and_segments=False,
        mixes_queries=True,  # landmarks are means of queries
        least_tokens={"": 4, "skip": 4, "more landmarks than queries": 9},
    ),
    "routing": Tiled(
        variants={"": {"cluster_size": 5}},
        mixes_queries=True,  # a cluster chooses among queries
        module={"num_clusters": 3, "cluster_size": 4, "local_window_size": 2},
        arguments=lambda rng, sizes: {
            "centroids": rng.normal(
                size=(sizes.heads, max(math.isqrt(sizes.queries), 2), sizes.size)
            )
        },
    ),
}


def small_tokens(arrays):
    """The arrays scaled towards zero, because the gates of Hyena multiply one another."""
    return {**arrays, "x": arrays["x"] * np.float32(1e-3)}


def synthesizer(mix=mixes.synthesizer, **options):
    return Case(mix=mix, variants={"": {"max_length": 16, **options}})


LSH = {"num_rounds": 2, "num_buckets": 4, "chunk_length": 3}
INDEXED = {"top_k": 4, "index_heads": 2}
HYENA = {"max_length": 16, "filter_features": 5, "frequency": 1.0}
AFT = {"max_length": 16, "rank": 3}
MIXTURE = ({"name": "sliding_window", "local_window_size": mixes.WINDOW}, {"name": "softmax"})

# Mechanisms without heads.
MIXERS = {
    "lsh": Case(
        mix=mixes.lsh,
        variants={"": LSH, "rotary": {**LSH, "rotary": RotaryEmbedding(theta=10.0)}},
        drawn=frozenset({"rotations"}),
    ),
    "indexed": Case(
        mix=mixes.indexed,
        variants={"": INDEXED, "rotary": {**INDEXED, "rotary": RotaryEmbedding(theta=10.0)}},
        drawn=frozenset({"index_query", "index_key", "index_norm", "index_weights"}),
    ),
    "fnet": Case(
        mix=lambda mixer, x: mixes.naive("fnet")(x, norm=mixer.norm),
        variants={"": {}, "ortho": {"norm": "ortho"}},
    ),
    "rwkv4": Case(mix=mixes.rwkv4),
    "rg_lru": Case(mix=mixes.rg_lru),
    "aft_full": Case(
        mix=mixes.attention_free("aft_full", mixes.factors),
        variants={"": AFT},
    ),
    "aft_simple": Case(mix=mixes.attention_free("aft_simple")),
    "aft_local": Case(
        mix=mixes.attention_free("aft_local", mixes.factors),
        variants={"": {**AFT, "local_window_size": 3}},
    ),
    "aft_conv": Case(
        mix=mixes.attention_free("aft_conv", lambda mixer: mixer.taps[...]),
        variants={"": {"local_window_size": 3}},
    ),
    "long_convolution": Case(
        mix=mixes.long_convolution,
        variants={
            "": {"max_length": 16},
            "smooth": {"max_length": 17, "smoothing": 2, "threshold": 0.1},
        },
    ),
    "hyena": Case(
        mix=mixes.hyena,
        variants={"": HYENA, "order 3": {**HYENA, "order": 3, "num_harmonics": 1}},
        bounded=small_tokens,
    ),
    "synthesizer": synthesizer(hidden_features=3),
    "synthesizer_factorized": synthesizer(),
    "synthesizer_random": synthesizer(mix=None),
    "synthesizer_factorized_random": synthesizer(hidden_features=3),
    "synthesizer_mixture": synthesizer(hidden_features=3),
    "gmlp": Case(mix=mixes.gmlp, variants={"": {"max_length": 16}}),
    "latent": Case(
        variants={
            "": {"rotary": None},
            "rotary": {"rotary": RotaryEmbedding(theta=10.0), "rotary_dim": 4, "query_rank": 5},
        },
    ),
    "gated_attention": Case(variants={"": {}, "by head": {"by_head": True, "num_kv_heads": 1}}),
    "talking_heads": Case(
        mix=mixes.talking_heads, variants={"": {}, "more": {"num_softmaxes": 3, "num_kv_heads": 1}}
    ),
    "lstm": Case(),
    "slstm": Case(variants={"": {}, "exp": {"forget_gate": "exp"}}),
    "gru": Case(),
    "convolution": Case(
        variants={"": {"width": 3, "dilation": 2}, "wide": {"width": 4, "dilation": 5}}
    ),
    "s4d": Case(mix=mixes.s4d, variants={"": {"state_size": 6}}),
    "s5": Case(mix=mixes.s5, variants={"": {"num_blocks": 2}}),
    "h3": Case(mix=mixes.h3, variants={"": {"state_size": 4, "head_dim": 2}}),
    "s4": Case(
        # The recurrence of a state space continues past the length of the convolution kernel.
        variants={
            "": {"state_size": 4, "max_length": 16},
            "longer": {"state_size": 4, "max_length": 12},
        },
    ),
    "mixture_of_mechanisms": Case(
        mix=mixes.mixture,
        variants={"": {"mechanisms": MIXTURE}, "top1": {"mechanisms": MIXTURE, "gate": "top1"}},
    ),
    "bidirectional": Case(
        variants={"": {"mixer": {"name": "mamba", "state_size": 3}}, "heads": {"mixer": "linear"}}
    ),
    "convolution_attention": Case(
        mix=mixes.convolve_and_attend,
        variants={"": {"width": 3}, "sum": {"width": 4, "combination": "sum"}},
    ),
    "recurrent_memory": Case(
        variants={
            "": {"segment_size": 5, "num_slots": 3},
            "short": {"segment_size": 2, "num_slots": 1},
        },
    ),
    "inducing_points": Case(variants={"": {"num_points": 3}}),
    "compressive": Case(
        variants={
            "": {
                "segment_size": 2,
                "memory_size": 4,
                "num_slots": 2,
                "compression_rate": 2,
                "stop_gradient": False,
            },
            "max": {
                "segment_size": 3,
                "memory_size": 3,
                "num_slots": 1,
                "compression_rate": 3,
                "compression": "max",
            },
        },
    ),
    "mega": Case(
        variants={
            "": {"chunk_length": 5, "ema_dim": 3, "shared_dim": 4, "value_dim": 6},
            "laplace": {
                "chunk_length": 4,
                "ema_dim": 2,
                "shared_dim": 3,
                "attention_function": "laplace",
                "relative_bias": "simple",
            },
        },
    ),
    "transformer_xl": Case(
        variants={
            "": {"segment_size": 3, "memory_size": 5},
            "through": {"segment_size": 4, "memory_size": 3, "stop_gradient": False},
        },
    ),
}

# For the tests of cost: options at a length, and mechanisms that run Fourier transforms.
BY_LENGTH = ("aft_full", "aft_local", "hyena", "long_convolution", "gmlp", "s4")
COST = {
    **dict.fromkeys(
        (n for n in MIXERS if n in BY_LENGTH or n.startswith("synthesizer")),
        lambda length: {"max_length": length},
    ),
    "lsh": lambda length: {"num_rounds": 2, "num_buckets": 16, "chunk_length": 32},
}
TRANSFORMS = frozenset({"fnet", "hyena", "long_convolution", "s4", "s4d", "h3", "mega"})
# For 16 bits: options without choices between numbers, which rounding would change.
NARROW = {"indexed": (("top_k", 64),), "lsh": (("num_buckets", 1),)}
