"""Training loop, on a bigram model, because the loop does not depend on attention."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Centroids, TransformerConfig, TransformerLM
from experiments.harness import metrics
from experiments.harness.errors import Diverged, UserError
from experiments.harness.optimisers import make_optimiser
from experiments.harness.programs import compile_programs
from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, train
from experiments.tasks.corpora import Corpus
from experiments.tasks.text import NOTHING, Examples, MaskedTokens
from experiments.tasks.tokenizers import ByteTokenizer
from experiments.tasks.windows import prepare
from tests.experiments.conftest import Lines

CONTEXT = 16
SCHEDULE = Schedule(steps=7, batch=4, accumulate=1, evaluate_every=3)


class Bigram(nnx.Module):
    """Bigram model: logits of the next token from the present token."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 8, rngs=rngs)
        self.head = nnx.Linear(8, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))

    def init_state(self, batch, max_length):
        return jnp.zeros((batch, max_length), jnp.float32)


@pytest.fixture(scope="module")
def data(documents):
    corpus = Corpus(tuple(documents[:15]), tuple(documents[15:]))
    return prepare(corpus, ByteTokenizer(), CONTEXT, batch=4, eval_windows=6)


@functools.cache
def optimiser():
    return make_optimiser("adamw", steps=7, warmup=0.2, clip=1.0, weight_decay=0.01)


@pytest.fixture(scope="module")
def programs(data):
    return compile_programs(Bigram, optimiser(), SCHEDULE, data)


@pytest.fixture
def run(tmp_path):
    return Run("bigram", tmp_path / "run", "identity", seed=1, learning_rate=0.01)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def untimed(path):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in metrics.read(path)]


def test_the_loss_falls_and_every_measurement_is_written(run, data, programs, lines):
    _, record = train(run, SCHEDULE, programs, data, lines)
    assert lines.steps == [1, 2, 3, 4, 5, 6, 7]
    records = metrics.read(run.folder / "metrics.jsonl")
    assert [r["step"] for r in records if "train_loss" in r] == [1, 2, 3, 4, 5, 6, 7]
    evaluations = [r for r in records if "valid_loss" in r]
    assert evaluations == lines.evaluations
    assert [r["step"] for r in evaluations] == [3, 6, 7]
    assert record == evaluations[-1]
    assert record["valid_loss"] < evaluations[0]["valid_loss"] < math.log(256) + 0.2
    assert record["bits_per_byte"] == pytest.approx(record["valid_loss"] / math.log(2))
    assert [r["tokens"] for r in records] == [r["step"] * 4 * CONTEXT for r in records]


def test_the_validation_loss_is_the_mean_over_all_validation_targets(run, data, programs, lines):
    params, record = train(run, SCHEDULE, programs, data, lines)
    logits = programs.model(params)(data.valid[:, :-1].astype(np.int32))
    targets = data.valid[:, 1:, None].astype(np.int32)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)
    assert record["valid_loss"] == pytest.approx(float(nats.mean()), rel=1e-6)


@pytest.mark.parametrize("stopped_at", [2, 3, 4, 7])
def test_a_killed_run_ends_with_the_same_parameters(run, data, programs, lines, stopped_at):
    class Killed(Exception):
        pass

    class Killer(Lines):
        def step(self, step, loss, tokens_per_second):
            if step == stopped_at:
                raise Killed

    whole = dataclasses.replace(run, folder=run.folder.with_name("whole"))
    expected, _ = train(whole, SCHEDULE, programs, data, Lines())
    with pytest.raises(Killed):
        train(run, SCHEDULE, programs, data, Killer())
    params, _ = train(run, SCHEDULE, programs, data, lines)
    assert_identical(params, expected)
    # The run resumed at the last evaluation, without gaps or duplicates.
    assert lines.steps[0] == 3 * ((stopped_at - 1) // 3) + 1
    assert untimed(run.folder / "metrics.jsonl") == untimed(whole.folder / "metrics.jsonl")


def test_a_finished_run_is_read_not_trained(run, data, programs, lines):
    expected, record = train(run, SCHEDULE, programs, data, Lines())
    before = (run.folder / "metrics.jsonl").read_text()
    params, again = train(run, SCHEDULE, programs, data, lines)
    assert_identical(params, expected)
    assert (again, lines.steps) == (record, [])
    assert (run.folder / "metrics.jsonl").read_text() == before


def test_time_goes_on_where_it_stopped(run, data, programs):
    stop = dataclasses.replace(SCHEDULE, steps=3)
    train(run, stop, programs, data, Lines())
    train(run, SCHEDULE, programs, data, Lines())
    seconds = [r["seconds"] for r in metrics.read(run.folder / "metrics.jsonl")]
    assert seconds == sorted(seconds)


def test_seeds_differ_in_parameters_and_order(run, data, programs):
    one, two = Lines(), Lines()
    train(run, SCHEDULE, programs, data, one)
    other = dataclasses.replace(run, folder=run.folder.with_name("two"), seed=2)
    train(other, SCHEDULE, programs, data, two)
    assert one.losses != two.losses


def test_accumulated_gradients_are_those_of_the_whole_batch(run, data, programs):
    expected, _ = train(run, SCHEDULE, programs, data, Lines())
    schedule = dataclasses.replace(SCHEDULE, accumulate=2)
    halves = compile_programs(Bigram, optimiser(), schedule, data)
    other = dataclasses.replace(run, folder=run.folder.with_name("halves"))
    params, _ = train(other, schedule, halves, data, Lines())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected)


def test_so_are_those_of_masked_tokens(run, data, lines):
    # UTF-8 texts have no byte 255, which therefore serves as the mask.
    masked = dataclasses.replace(data, objective=MaskedTokens(255))
    schedule = dataclasses.replace(SCHEDULE, steps=2, evaluate_every=2)
    whole = compile_programs(Bigram, optimiser(), schedule, masked)
    expected, record = train(run, schedule, whole, masked, lines)
    assert whole.state_bytes is None
    inputs, targets = masked.objective.validation(masked.valid)
    nats = -jax.nn.log_softmax(whole.model(expected)(inputs))
    of_targets = jnp.take_along_axis(nats, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    mean = float(of_targets[targets != NOTHING].mean())
    assert record["valid_loss"] == pytest.approx(mean, rel=1e-6)

    schedule = dataclasses.replace(schedule, accumulate=2)
    halves = compile_programs(Bigram, optimiser(), schedule, masked)
    other = dataclasses.replace(run, folder=run.folder.with_name("halves"))
    params, _ = train(other, schedule, halves, masked, lines)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected)


def test_the_learning_rate_is_no_constant_of_the_program(run, data, programs):
    still = dataclasses.replace(run, learning_rate=0.0)
    params, _ = train(still, SCHEDULE, programs, data, Lines())
    assert_identical(params, programs.init(1)[0])


@pytest.mark.slow
def test_centroids_move_with_each_step_and_are_no_parameters(data):
    mixer = {"name": "routing", "num_clusters": 2, "cluster_size": 4}
    config = TransformerConfig(vocab_size=256, num_layers=1, features=8, num_heads=2, mixer=mixer)

    def build(rngs):
        return TransformerLM(config, rngs=rngs)

    routing = compile_programs(build, optimiser(), SCHEDULE, data)
    params, state = routing.init(1)
    before = jax.tree.map(jnp.copy, params["moved"])  # a step takes over the memory
    tokens = data.valid[None, :4, 1:].astype(np.int32)
    after, *_ = routing.step(params, state, 0.1, Examples(tokens, tokens))

    @jax.jit
    def centroids(model):
        model.update_centroids(tokens[0])
        return nnx.state(model, Centroids)

    expected = centroids(routing.model({**after, "moved": before}))
    (got,), (wanted,) = (jax.tree.leaves(of) for of in (after["moved"], expected))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert np.any(got != jax.tree.leaves(before)[0])
    assert routing.parameters == sum(x.size for x in jax.tree.leaves(after["trained"]))


def test_a_step_is_called_before_it_is_timed(data, monkeypatch):
    calls, call = [], jax.stages.Compiled.__call__

    def record(*arguments):
        calls.append(arguments[0])
        return call(*arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", record)
    programs = compile_programs(Bigram, optimiser(), SCHEDULE, data)
    assert calls == [programs.step]


def test_programs_know_their_sizes(programs):
    assert programs.parameters == 256 * 8 + 8 * 256 + 256
    assert programs.state_bytes == CONTEXT * 4
    assert programs.temporary_bytes > 0


def poisoned(programs, bad_step):
    """Returns programs whose loss is NaN at one step."""
    taken = 0

    def step(*arguments):
        nonlocal taken
        taken += 1
        params, state, loss = programs.step(*arguments)
        return params, state, loss * jnp.nan if taken == bad_step else loss

    return dataclasses.replace(programs, step=step)


@pytest.mark.parametrize(
    ("bad_step", "kept"),
    [(2, "no checkpoint had been written"), (6, "step 3 is kept"), (7, "step 6 is kept")],
)
def test_a_loss_that_is_not_a_number_stops_the_run(run, data, programs, bad_step, kept):
    with pytest.raises(
        Diverged, match=f"bigram became NaN or infinite at step {bad_step}; .*{kept}"
    ):
        train(run, SCHEDULE, poisoned(programs, bad_step), data, Lines())
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()
    # The checkpoint is good: training with the original programs resumes from it.
    _, record = train(run, SCHEDULE, programs, data, Lines())
    assert math.isfinite(record["valid_loss"])


def test_parameters_that_are_no_numbers_are_never_saved(run, data, programs):
    def step(*arguments):
        params, state, loss = programs.step(*arguments)
        return jax.tree.map(lambda x: x * jnp.nan, params), state, loss

    schedule = dataclasses.replace(SCHEDULE, evaluate_every=1)
    with pytest.raises(Diverged, match="at step 1; no checkpoint"):
        train(run, schedule, dataclasses.replace(programs, step=step), data, Lines())
    assert not list((run.folder / "checkpoints").iterdir())


def test_metrics_drop_torn_and_later_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    with metrics.Metrics(path, 2) as file:
        file.write({"step": 3, "again": True})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "again": True},
    ]


@pytest.mark.parametrize("line", [b"garbage", b"\0\0", b"[]", b"{}"])
def test_a_damaged_line_of_metrics_is_one_sentence(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=f"damaged at line 2; delete {tmp_path} to train"):
        metrics.read(path)


def test_a_run_whose_metrics_are_gone_does_not_go_on_without_them(run, data, programs):
    train(run, dataclasses.replace(SCHEDULE, steps=3), programs, data, Lines())
    (run.folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="ends at step 0, and the run went on to 3; delete"):
        train(run, SCHEDULE, programs, data, Lines())
    assert not (run.folder / "metrics.jsonl").exists()
