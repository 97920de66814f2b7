"""Checks of a configuration, before anything is read or written."""

import math
from typing import Any

from experiments.common.errors import UserError


def check(config: Any, is_causal: bool = True) -> None:
    """Raises `UserError` if the settings of a language model's training do not fit together.

    Args:
      config: `experiments.common.command.Options`.
      is_causal: whether a token of the models sees those before it alone.
    """
    counts = (
        *("window", "layers", "width", "heads", "batch", "accumulate", "steps"),
        *("evaluate_every", "eval_windows"),
    )
    for name in counts:
        _require(getattr(config, name) >= 1, config, name, "must be at least 1")
    good = config.at_once is None or config.at_once >= 1
    _require(good, config, "at_once", "must be at least 1")
    for name in ("mechanisms", "seeds"):
        values = getattr(config, name)
        _require(len(values) > 0, config, name, "needs at least one")
        _require(len(set(values)) == len(values), config, name, "must not repeat a value")
    _require(min(config.seeds) >= 0, config, "seeds", "must not be negative")
    _require(config.context >= 4, config, "context", "must be at least 4")
    _require(config.width % config.heads == 0, config, "width", "must be a multiple of --heads")
    _require(
        config.width // config.heads % 2 == 0,
        config,
        "heads",
        f"must divide --width {config.width} into even head sizes, for rotary positions",
    )
    _require(config.batch % config.accumulate == 0, config, "batch", "must split by --accumulate")
    for name in ("learning_rate", "clip"):
        value = getattr(config, name)
        good = value is None or 0 < value < math.inf
        _require(good, config, name, "must be positive and finite")
    _require(all(0 < r < math.inf for r in config.sweep), config, "sweep", "must be positive rates")
    _require(len(set(config.sweep)) == len(config.sweep), config, "sweep", "must not repeat a rate")
    both = config.sweep and config.learning_rate is not None
    _require(not both, config, "sweep", "finds the learning rate: leave out --learning-rate")
    _require(0 <= config.warmup < 1, config, "warmup", "must be a fraction of the steps, below 1")
    _require(0 <= config.weight_decay < math.inf, config, "weight_decay", "must be 0 or positive")
    if config.tokenizer == "bpe":
        _require(config.vocabulary > 256, config, "vocabulary", "must exceed the 256 bytes")
    _check_mechanisms(config, is_causal)


def _require(good: bool, config: Any, name: str, need: str) -> None:
    if not good:
        value = getattr(config, name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise UserError(f"--{name.replace('_', '-')} {need}, got {shown}")


def _check_mechanisms(config: Any, is_causal: bool) -> None:
    # Only now: the library imports JAX, which --help and typing errors need not wait for.
    from experiments.common import models

    sizes = (config.layers, config.width, config.heads, config.window, config.precision)
    for text in config.mechanisms:
        try:
            build = models.language_model(
                text, 256, *sizes, config.context, config.equal_parameters, is_causal
            )
            models.check(build, config.context)
        except ValueError as error:
            raise UserError(f"--mechanisms: {error}") from None
