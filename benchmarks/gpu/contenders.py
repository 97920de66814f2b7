"""Contenders of each comparison on a GPU."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import effattn
from benchmarks.contenders import Contender, flex, in_jax, in_torch, tokamax
from benchmarks.gpu.cases import Case, state_space_rate

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "jax_triton", "xla")
FLEX_EXACT = (8192, 128)  # the only exact case of FlexAttention, which compiles slowly


def contenders(case: Case, device: str) -> tuple[Contender, ...]:
    """Returns the contenders of a case; `device` is PyTorch's name of the device."""
    ours = functools.partial(OURS[case.comparison], case)
    return (
        *(
            Contender(f"effattn {name}", case.comparison, in_jax(functools.partial(ours, name)))
            for name in IMPLEMENTATIONS
        ),
        *PEERS[case.comparison](case, device),
    )


def _exact(case, implementation, *arrays):
    return effattn.dot_product_attention(*arrays, **case.options, implementation=implementation)


def _window(case, implementation, *arrays):
    return effattn.sliding_window_attention(*arrays, **case.options, implementation=implementation)


def _segment_ids(case):
    (ids,) = case.tables
    return jnp.broadcast_to(jnp.asarray(ids), (case.batch, case.length))


def _documents(case, implementation, *arrays):
    return effattn.dot_product_attention(
        *arrays, **case.options, segment_ids=_segment_ids(case), implementation=implementation
    )


def _block_sparse(case, implementation, *arrays):
    return effattn.block_sparse_attention(*arrays, **case.options, implementation=implementation)


def _bigbird(case, implementation, *arrays):
    return effattn.bigbird_attention(*arrays, **case.options, implementation=implementation)


def _longformer(case, implementation, *arrays):
    first = jnp.arange(case.length) < case.options["max_global"]
    return effattn.longformer_attention(
        *arrays,
        **case.options,
        global_mask=jnp.broadcast_to(first, (case.batch, case.length)),
        implementation=implementation,
    )


def _linear(case, implementation, *arrays):
    return effattn.linear_attention(*arrays, is_causal=True, implementation=implementation)


def _retention(case, implementation, *arrays):
    return effattn.retention(*arrays, implementation=implementation)


def _gated(case, implementation, query, key, value, log_decay):
    return effattn.gated_linear_attention(
        query, key, value, log_decay=log_decay, implementation=implementation
    )


def _state_space(case, implementation, query, key, value, step):
    return effattn.state_space_duality(
        query, key, value, step_size=step, rate=jnp.asarray(state_space_rate(case.heads)),
        implementation=implementation,
    )  # fmt: skip


def _delta(case, implementation, query, key, value, beta):
    return effattn.delta_rule_attention(query, key, value, beta=beta, implementation=implementation)


def _gated_delta(case, implementation, query, key, value, log_decay, beta):
    return effattn.delta_rule_attention(
        query, key, value, beta=beta, log_decay=log_decay, implementation=implementation
    )


def _decode(case, implementation, query, keys, values):
    return effattn.paged_attention(
        query, keys, values, block_table=case.options["block_table"],
        lengths=jnp.full(case.batch, case.length), implementation=implementation,
    )  # fmt: skip


# (case, implementation, *operands) -> output.
OURS: dict[str, Callable[..., jax.Array]] = {
    "causal": _exact,
    "bidirectional": _exact,
    "window": _window,
    "documents": _documents,
    "grouped": _exact,
    "block sparse": _block_sparse,
    "bigbird": _bigbird,
    "longformer": _longformer,
    "linear": _linear,
    "retention": _retention,
    "scalar gate": _gated,
    "vector gate": _gated,
    "state space": _state_space,
    "delta rule": _delta,
    "gated delta rule": _gated_delta,
    "decode": _decode,
}


def _of_jax(case, device):
    """Yields the peers that take the arguments of `jax.nn.dot_product_attention`."""
    cudnn = in_jax(jax.nn.dot_product_attention, implementation="cudnn", **case.options)
    yield Contender("cuDNN", case.comparison, cudnn)
    yield Contender("Tokamax", case.comparison, in_jax(tokamax, **case.options), "tokamax")


def _jla_attention(case, device):
    """Yields causal attention of jax-linear-attention."""

    def attend(*arrays):
        given: dict[str, Any] = {}
        if "local_window_size" in case.options:
            given["sliding_window"] = case.options["local_window_size"][0] + 1
        if case.comparison == "documents":
            given["segment_ids"] = _segment_ids(case)
        function = importlib.import_module("jla.layers.attention").attention
        return function(*arrays, implementation="mosaic_gpu", **given)

    yield Contender("jax-linear-attention", case.comparison, in_jax(attend), "jla")


def _sdpa(case, device):
    def make(length):
        from torch.nn.functional import scaled_dot_product_attention

        return functools.partial(
            scaled_dot_product_attention,
            is_causal=case.options["is_causal"],
            enable_gqa=case.heads != case.kv_heads,
        )

    yield Contender("PyTorch SDPA", case.comparison, in_torch(make, device), "torch")


def _flex(case, device):
    def make(length):
        import torch

        tables = [torch.tensor(table, device=device) for table in case.tables]
        return flex(
            lambda query, key: case.allowed(query, key, *tables),
            length,
            device,
            enable_gqa=case.heads != case.kv_heads,
        )

    yield Contender("PyTorch FlexAttention", case.comparison, in_torch(make, device), "torch")


def _all_pairs(case, device):
    yield from _of_jax(case, device)
    if case.options["is_causal"]:
        yield from _jla_attention(case, device)
    yield from _sdpa(case, device)
    if case.comparison == "causal" and (case.length, case.head_size) == FLEX_EXACT:
        yield from _flex(case, device)


def _some_pairs(case, device):
    yield from _of_jax(case, device)
    yield from _jla_attention(case, device)
    yield from _flex(case, device)


def _packed(case, device):
    yield from _jla_attention(case, device)
    yield from _flex(case, device)


def _fla(case, device, attend):
    """Yields a function of flash-linear-attention.

    `attend(function, *operands)` returns the output; `function` calls the library by module and
    name.
    """

    def function(module, name, *arrays, **options):
        return getattr(importlib.import_module(f"fla.ops.{module}"), name)(*arrays, **options)[0]

    program = in_torch(
        lambda length: functools.partial(attend, function), device, heads_first=False
    )
    yield Contender("flash-linear-attention", case.comparison, program, "fla")


def _fla_linear(function, query, key, value):
    from torch.nn.functional import elu

    features = elu(query) + 1, elu(key) + 1
    return function("linear_attn", "chunk_linear_attn", *features, value, normalize=True)


def _fla_of(module, name):
    """Returns `attend` for a function with effattn's operands."""
    return lambda function, *arrays: function(module, name, *arrays)


def _fla_state_space(rate, function, query, key, value, step):
    import torch

    log_decay = step * torch.tensor(rate, device=step.device)
    written = value * step[..., None].to(value.dtype)
    return function("simple_gla", "chunk_simple_gla", query, key, written, log_decay, scale=1.0)


def _jla(case, device, kind, *gates, **options):
    """Yields a recurrence of jax-linear-attention; `gates` names the operands after the value."""

    def attend(query, key, value, *others):
        function = importlib.import_module("jla.ops").linear_attention
        named = dict(zip(gates, others, strict=True))
        return function(kind, query, key, value, impl="mosaic_gpu", **named, **options)[0]

    yield Contender("jax-linear-attention", case.comparison, in_jax(attend), "jla")


def _jla_state_space(case, device):
    def attend(query, key, value, step):
        function = importlib.import_module("jla.ops").linear_attention
        written = value * step[..., None].astype(value.dtype)
        log_decay = step * state_space_rate(case.heads)
        return function(
            "simple_gla", query, key, written, g=log_decay, scale=1.0, impl="mosaic_gpu"
        )[0]

    yield Contender("jax-linear-attention", case.comparison, in_jax(attend), "jla")


def _recurrent(attend, kind, *gates):
    def peers(case, device):
        yield from _jla(case, device, kind, *gates)
        yield from _fla(case, device, attend)

    return peers


def _state_space_peers(case, device):
    yield from _jla_state_space(case, device)
    rate = state_space_rate(case.heads)
    yield from _fla(case, device, functools.partial(_fla_state_space, rate))


def _nobody(case, device):
    return ()


PEERS: dict[str, Callable[[Case, str], Any]] = {
    "causal": _all_pairs,
    "bidirectional": _all_pairs,
    "window": _some_pairs,
    "documents": _packed,
    "grouped": _all_pairs,
    "block sparse": _flex,
    "bigbird": _flex,
    "longformer": _flex,
    "linear": functools.partial(_fla, attend=_fla_linear),
    "retention": functools.partial(_fla, attend=_fla_of("retention", "chunk_retention")),
    "scalar gate": _recurrent(_fla_of("simple_gla", "chunk_simple_gla"), "simple_gla", "g"),
    "vector gate": _recurrent(_fla_of("gla", "chunk_gla"), "gla", "g"),
    "state space": _state_space_peers,
    "delta rule": _recurrent(_fla_of("delta_rule", "chunk_delta_rule"), "deltanet", "beta"),
    "gated delta rule": _recurrent(
        _fla_of("gated_delta_rule", "chunk_gated_delta_rule"), "gated_deltanet", "g", "beta"
    ),
    "decode": _nobody,
}
