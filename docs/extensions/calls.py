"""Programs that call the function of each mechanism, with the arrays that it needs."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from effattn.registry import Mechanism

WIDTH = 88
_HEADS = "B, T, N, H = 1, 4096, 8, 64  # batch, length, heads, head size"
_TOKENS = "B, T, D = 1, 4096, 512  # batch, length, features"
_ARRAYS = "query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, {}))"


def _normal(seed: int, shape: str) -> str:
    return f"jax.random.normal(jax.random.key({seed}), ({shape}))"


_UNIT_KEY = "key / jnp.linalg.norm(key, axis=-1, keepdims=True)"
_STRENGTH = f"jax.nn.sigmoid({_normal(1, 'B, T, N')})"
_DECAY = f"jax.nn.log_sigmoid({_normal(2, 'B, T, N')})"
_DECAYS = f"jax.nn.log_sigmoid({_normal(2, 'B, T, N, H')})"

# Code of arguments by name, where the query, the key and the value are not all that a call needs.
# Names that are not arguments of the function are intermediate variables.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "additive": {
        "query_kernel": f"{_normal(1, 'N, H, 32')} / H**0.5",
        "key_kernel": f"{_normal(2, 'N, H, 32')} / H**0.5",
        "score": _normal(3, "N, 32"),
    },
    "forgetting": {"log_forget": _DECAY},
    "path": {"reflection": _UNIT_KEY, "beta": f"2 * {_STRENGTH}"},
    "dilated": {"dilation": "2"},
    "infini": {"gate": "jnp.zeros(N)"},
    "differential": {"lambda_": "0.5"},
    "talking_heads": {"logits_mix": "jnp.eye(N)", "weights_mix": "jnp.eye(N)"},
    "learned_blocks": {
        "selection_query": _normal(1, "B, T, N, H"),
        "selection_key": _normal(2, "B, T, N, H"),
    },
    "selective": {
        "selection_query": f"{_normal(1, 'B, T, 1, H')}",
        "selection_key": f"{_normal(2, 'B, T, 1, H')}",
    },
    "adaptive_span": {"span": "jnp.full(N, 64.0)"},
    "longformer": {
        "global_mask": "jnp.zeros((B, T), bool).at[:, :16].set(True)",
        "max_global": "16",
    },
    "block_sparse": {"block_mask": "lambda m, n: (n == 0) | (abs(m - n) <= 2)"},
    "gated_linear": {"log_decay": _DECAYS},
    "hgrn2": {"log_decay": _DECAYS, "key": "1 - jnp.exp(log_decay)"},
    "mlstm": {"log_input_gate": _normal(1, "B, T, N"), "log_forget_gate": _DECAY},
    "log_linear": {
        "log_decay": _DECAY,
        "levels": f"jax.nn.softplus({_normal(3, 'B, T, N, 13')})",
    },
    "gated_slot": {"log_decay": f"jax.nn.log_sigmoid({_normal(1, 'B, T, N, 64')}) / 8"},
    "mamba2": {
        "step_size": f"jax.nn.softplus({_normal(1, 'B, T, N')})",
        "rate": "-jnp.ones(N)",
    },
    "mamba3": {
        "step_size": f"jax.nn.softplus({_normal(1, 'B, T, N')})",
        "log_decay": "-step_size",
        "trapezoid": "jnp.full((B, T, N), 0.5)",
        "angle": f"{_normal(2, 'B, T, N, 2')} / 8",
    },
    "rwkv6": {"log_decay": _DECAYS, "bonus": "jnp.ones((N, H))"},
    "mamba": {
        "step_size": f"jax.nn.softplus({_normal(1, 'B, T, N, H')})",
        "rate": "-jnp.ones((N, H, H))",
    },
    "delta_net": {"key": _UNIT_KEY, "beta": _STRENGTH},
    "gated_delta_net": {"key": _UNIT_KEY, "beta": _STRENGTH, "log_decay": _DECAY},
    "delta_product": {
        "key": _UNIT_KEY,
        "beta": f"2 * jax.nn.sigmoid({_normal(1, 'B, T, N, 2')})",
        "log_decay": _DECAY,
        "later_keys": "key[:, :, :, None, ::-1]",
        "later_values": "value[:, :, :, None]",
    },
    "kimi_delta": {"key": _UNIT_KEY, "beta": _STRENGTH, "log_decay": _DECAYS},
    "gated_delta_net_2": {
        "key": _UNIT_KEY,
        "log_decay": _DECAYS,
        "erase": f"jax.nn.sigmoid({_normal(3, 'B, T, N, H')})",
        "write": f"jax.nn.sigmoid({_normal(4, 'B, T, N, H')})",
    },
    "mesa": {
        "key": _UNIT_KEY,
        "beta": _STRENGTH,
        "log_decay": _DECAY,
        "regulariser": "jnp.ones((N, H))",
    },
    "titans": {
        "key": _UNIT_KEY,
        "learning_rate": f"{_STRENGTH} / 16",
        "momentum": f"jax.nn.sigmoid({_normal(3, 'B, T, N')})",
        "log_decay": _DECAY,
    },
    "ttt_linear": {
        "learning_rate": f"{_STRENGTH} / H",
        "initial_weights": f"{_normal(2, 'N, H, H')} / H**0.5",
        "initial_bias": "jnp.zeros((N, H))",
        "norm_scale": "jnp.ones((N, H))",
        "norm_bias": "jnp.zeros((N, H))",
    },
    "rwkv7": {
        "log_decay": _DECAYS,
        "removal_key": _UNIT_KEY,
        "learning_rate": f"jax.nn.sigmoid({_normal(1, 'B, T, N, H')})",
    },
    "performer": {"projection": "effattn.performer_features(jax.random.key(1), 256, H)"},
    "random_features": {"projection": "effattn.performer_features(jax.random.key(1), 128, H)"},
    "cosformer": {"max_length": "T"},
    "hedgehog": {"query_projection": "jnp.eye(H)[None]", "key_projection": "jnp.eye(H)[None]"},
    "linformer": {
        "key_projection": f"{_normal(1, '64, T')} / T**0.5",
        "value_projection": f"{_normal(2, '64, T')} / T**0.5",
    },
    "block_linformer": {
        "key_projection": f"{_normal(1, '16, 64')} / 8",
        "value_projection": f"{_normal(2, '16, 64')} / 8",
    },
    "luna": {"pack_query": _normal(1, "N, 16, H")},
    "indexed": {
        "index_query": _normal(1, "B, T, N, H"),
        "index_key": _normal(2, "B, T, H"),
        "index_weights": _normal(3, "B, T, N"),
        "top_k": "32",
    },
    "sinkhorn": {"sort_projection": f"{_normal(1, 'N, 64, H')} / (64 * H) ** 0.5"},
    "native_sparse": {"gates": "jnp.full((B, T, N, 3), 1 / 3)"},
    "long_short": {"projection": f"{_normal(1, 'H, 8')} / H**0.5"},
    "lsh": {
        "query_key": _normal(0, "B, T, N, H"),
        "value": _normal(1, "B, T, N, H"),
        "num_rounds": "4",
        "num_buckets": "64",
        "chunk_length": "64",
        "rng": "jax.random.key(2)",
    },
    "routing": {"centroids": _normal(1, "N, 64, H"), "cluster_size": "64"},
    "fnet": {"x": _normal(0, "B, T, D")},
    "rwkv4": {
        "key": _normal(0, "B, T, D"),
        "value": _normal(1, "B, T, D"),
        "decay": "jnp.ones(D)",
        "bonus": "jnp.zeros(D)",
    },
    "rg_lru": {
        "x": _normal(0, "B, T, D"),
        "recurrence_gate": f"jax.nn.sigmoid({_normal(1, 'B, T, D')})",
        "input_gate": f"jax.nn.sigmoid({_normal(2, 'B, T, D')})",
        "log_decay": "jnp.full(D, -0.01)",
    },
    "aft_full": {"position_bias": f"tuple({_normal(1, '2, T, 32')} / 8)"},
    "aft_local": {
        "position_bias": f"tuple({_normal(1, '2, T, 32')} / 8)",
        "local_window_size": "32",
    },
    "aft_conv": {"position_bias": _normal(1, "8, 33"), "local_window_size": "32"},
    "hyena": {
        "gates": _normal(0, "2, B, T, D"),
        "value": _normal(1, "B, T, D"),
        "filters": f"{_normal(2, '2, T, D')} / T",
    },
    "long_convolution": {
        "x": _normal(0, "B, T, D"),
        "filter": f"{_normal(1, 'T, D')} / T",
    },
    "synthesizer": {
        "hidden": f"jax.nn.relu({_normal(0, 'B, T, N, 32')})",
        "table": _normal(1, "T, N, 32"),
        "value": _normal(2, "B, T, N, H"),
    },
    "synthesizer_factorized": {
        "coarse": _normal(0, "B, T, N, 64"),
        "fine": _normal(1, "B, T, N, 64"),
        "value": _normal(2, "B, T, N, H"),
    },
    "synthesizer_factorized_random": {
        "hidden": _normal(0, "1, T, N, 32"),
        "table": _normal(1, "T, N, 32"),
        "value": _normal(2, "B, T, N, H"),
    },
    "synthesizer_mixture": {
        "query, key, value": _normal(0, "3, B, T, N, H"),
        "dense, rows": _normal(1, "2, B, T, N, 32"),
        "hidden": "jnp.concatenate([jax.nn.relu(dense), query / H**0.5], -1) / 2",
        "table": "jnp.concatenate([rows, key], -1)",
    },
    "gmlp": {
        "gate": _normal(0, "B, T, D"),
        "value": _normal(1, "B, T, D"),
        "weights": f"{_normal(2, 'T, T')} / T",
        "bias": "jnp.ones(T)",
    },
    "s4d": {
        "x": _normal(0, "B, T, D"),
        "rate": "-0.5 + 1j * jnp.pi * jnp.arange(32) * jnp.ones((D, 1))",
        "output": f"{_normal(1, 'D, 32')} + 0j",
        "step_size": "jnp.full(D, 0.01)",
    },
    "h3": {
        "rate": "-0.5 + 1j * jnp.pi * jnp.arange(32) * jnp.ones((8, 1))  # 8 heads",
        "output": f"{_normal(1, '8, 32')} + 0j",
        "step_size": "jnp.full(8, 0.01)",
    },
    "s5": {
        "x": _normal(0, "B, T, D"),
        "rate": "-0.5 + 1j * jnp.pi * jnp.arange(32)",
        "input": f"{_normal(1, '32, D')} + 0j",
        "output": f"{_normal(2, 'D, 32')} + 0j",
        "step_size": "jnp.full(32, 0.01)",
    },
}


def program(entry: Mechanism) -> str:
    """A program that makes the arguments of a mechanism's function and calls it."""
    function: Any = entry.function
    parameters = inspect.signature(function).parameters
    code = {**_required(entry, parameters), **_ARGUMENTS.get(entry.name, {})}
    inline = {name: text for name, text in code.items() if text.isalnum()}
    lines = [f"{names} = {text}" for names, text in code.items() if names not in inline]
    made = {name for names in code for name in names.split(", ")}
    has_heads = entry.takes_heads or bool(re.search(r"\bN\b", " ".join(code.values())))
    if "query" in parameters:
        lines.insert(0, _ARRAYS.format("N, H" if has_heads else "D"))
    lines.insert(0, _HEADS if has_heads else _TOKENS)
    is_causal = "is_causal" in parameters and "causal" in entry.capabilities
    arguments = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    arguments += [f"{n}={inline.get(n, n)}" for n in parameters if n in made and n not in arguments]
    arguments += ["is_causal=True"] * is_causal
    imports = ["import jax", *["import jax.numpy as jnp"] * ("jnp." in "".join(lines))]
    call = _call(f"y = effattn.{function.__name__}", arguments)
    return "\n".join([*imports, "import effattn", "", *lines, call])


def _required(entry: Mechanism, parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Required options of a function over heads, as layers give them."""
    return {
        name: repr(entry.options[name])
        for name, parameter in parameters.items()
        if entry.takes_heads and name in entry.options and parameter.default is parameter.empty
    }


def _call(function: str, arguments: Sequence[str]) -> str:
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        return line
    inside = "".join(f"    {each},\n" for each in arguments)
    return f"{function}(\n{inside})"
