"""Training and evaluation of an encoder-decoder on pairs of texts."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from effattn.nn import EncoderDecoder, EncoderDecoderConfig, TransformerConfig, generate
from experiments.common import mixers, models, optimisers
from experiments.common.errors import Diverged
from experiments.common.pairs import END, START, VOCABULARY, Pairs, Rows


class Sizes(NamedTuple):
    """Sizes of a model: layers of encoder and decoder, features, heads, tokens in a window."""

    layers: int
    width: int
    heads: int
    window: int


def model_of(encoder: str, sizes: Sizes, most: int) -> Callable[[nnx.Rngs], EncoderDecoder]:
    """Returns a function that builds the model with these mixers in the encoder.

    Args:
      encoder: text for `experiments.common.mixers.parse`.
      sizes: sizes of the model.
      most: number of tokens in the longest source.

    Raises:
      ValueError: as in `experiments.common.mixers.parse`.
    """
    layers, width, heads, window = sizes
    common: dict[str, Any] = {"num_layers": layers, "features": width, "num_heads": heads}
    mixer = mixers.parse(encoder, layers, heads, window, most, is_causal=False)
    config = EncoderDecoderConfig(
        encoder=TransformerConfig(
            VOCABULARY, mixer=mixer, max_length=most, is_causal=False, **common
        ),
        decoder=TransformerConfig(VOCABULARY, **common),
    )
    return lambda rngs: EncoderDecoder(config, rngs=rngs)


def check(encoder: str, build: Callable[[nnx.Rngs], EncoderDecoder], most: int) -> None:
    """Raises the error of building or calling the model, without computing the call."""

    def call(tokens, lengths):
        return build(nnx.Rngs(0))(tokens, tokens, source_lengths=lengths)

    tokens = jax.ShapeDtypeStruct((1, most), jnp.int32)
    models.check_call(encoder, call, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))


def train(
    name: str,
    build: Callable[[nnx.Rngs], EncoderDecoder],
    pairs: Pairs,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    evaluate_every: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Trains one model by AdamW and evaluates it regularly on the held-out pairs.

    Returns:
      The record of the last evaluation, with further keys: "curve", the records of all evaluations;
      "parameters"; "seconds" of training; and "written", the outputs for the held-out sources.

    Raises:
      Diverged: the loss of a step became NaN or infinite.
    """
    optimiser = optimisers.make_optimiser("adamw", steps, 0.1, 1.0, 0.0)
    parts: Any = nnx.split(build(nnx.Rngs(seed)), nnx.Param, ...)
    graph, params, fixed = parts
    params = nnx.to_pure_dict(params)
    state = optimiser.init(params)

    def model(params):
        return nnx.merge(graph, params, fixed)

    @jax.jit
    def step(params, state, rows):
        def loss_of(params):
            nats = optax.softmax_cross_entropy_with_integer_labels(
                _logits(model(params), rows), rows.wanted
            )
            is_wanted = _is_wanted(rows)
            return jnp.where(is_wanted, nats, 0).sum() / is_wanted.sum()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimiser.update(gradients, state, params)
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def right(params, rows):
        return (_logits(model(params), rows).argmax(-1) == rows.wanted) & _is_wanted(rows)

    rng, seconds = np.random.default_rng(seed), 0.0
    curve: list[dict[str, Any]] = []
    written = np.zeros(0)
    # Losses are read at evaluations only, so that the device does not wait for the host.
    unread: list[jax.Array] = []
    # Compilation is not part of the training time.
    jax.block_until_ready(step(params, state, pairs.train.take(np.zeros(batch, int))))
    started = time.perf_counter()
    for number in range(1, steps + 1):
        rows = pairs.train.take(rng.integers(len(pairs.train.source), size=batch))
        params, state, loss = step(params, state, rows)
        unread.append(loss)
        if number % evaluate_every and number < steps:
            continue
        first = number - len(unread) + 1
        for at, each in enumerate(jax.device_get(unread), first):
            if not math.isfinite(each):
                raise Diverged(name, at, "try a lower --learning-rate")
        unread.clear()
        seconds += time.perf_counter() - started
        written = write(model(params), pairs.held_out)
        record = {
            "step": number,
            "loss": float(loss),
            "token_accuracy": float(right(params, pairs.held_out).sum())
            / float(pairs.held_out.target_lengths.sum()),
            "exact_match": float(is_exact(written, pairs.held_out).mean()),
        }
        curve.append(record)
        say(
            f"{name}, step {number}: loss {record['loss']:.3f}, tokens "
            f"{record['token_accuracy']:.1%}, exact {record['exact_match']:.1%}"
        )
        started = time.perf_counter()
    return {
        **curve[-1],
        "curve": curve,
        "seconds": seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "written": written,
    }


def write(model: EncoderDecoder, rows: Rows) -> np.ndarray:
    """Returns the greedy output of the model for each source: int `(n, T)`."""
    start = jnp.full((len(rows.source), 1), START, jnp.int32)
    given = model.given(jnp.asarray(rows.source), lengths=jnp.asarray(rows.source_lengths))
    tokens = generate(
        given, start, max_new_tokens=rows.wanted.shape[1], temperature=0.0, eos_id=END
    )
    return np.asarray(tokens)


def is_exact(written: np.ndarray, rows: Rows) -> np.ndarray:
    """Returns which outputs equal their targets, including the end: bool `(n,)`."""
    return ((written == rows.wanted) | ~np.asarray(_is_wanted(rows))).all(-1)


def _logits(model: EncoderDecoder, rows: Rows) -> jax.Array:
    return model(
        rows.source,
        rows.target,
        source_lengths=rows.source_lengths,
        target_lengths=rows.target_lengths,
    )


def _is_wanted(rows: Rows) -> jax.Array:
    return jnp.arange(rows.wanted.shape[1]) < rows.target_lengths[:, None]
