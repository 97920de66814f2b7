"""Short and long range in one sequence, against a reader that sees it from the left."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import TransformerConfig, TransformerLM
from experiments.tasks.mixed_range import TASKS
from experiments.tasks.task import NOTHING, Scores

TASK = TASKS["mixed-range"]["small"]
TINY = dataclasses.replace(TASK, trained=((64,),), held_out_tokens=2**10)


@pytest.mark.parametrize("task", TASKS["mixed-range"].values(), ids=TASKS["mixed-range"])
def test_a_reader_adds_neighbours_and_remembers_pairs(task):
    batch = task.training(20, 0, 0)
    start = task.pairs
    for tokens, targets in zip(batch.inputs[0].tolist(), batch.targets.tolist(), strict=True):
        pairs = [divmod(token - task.vocabulary, task.symbols) for token in tokens[:start]]
        values = {task.symbols + key: value for key, value in pairs}
        assert len(values) == task.pairs and targets[: start + 1] == [NOTHING] * (start + 1)
        for t in range(start + 1, len(tokens)):
            if tokens[t] in values:
                assert targets[t] == values[tokens[t]] and t >= start + task.distance
            else:
                assert targets[t] == (tokens[t - 1] + tokens[t]) % task.symbols
    (length,) = task.trained[0]
    far = task.is_far(batch).sum(1)
    assert (far == round(task.share * (length - start - task.distance))).all()
    np.testing.assert_array_equal(task.is_far(batch) ^ task.is_near(batch), batch.targets >= 0)


def test_near_and_far_targets_are_measured_apart():
    batch = TINY.training(8, 0, 0)
    right = TINY.is_near(batch)
    measured = TINY.measure("validation", batch, Scores(np.zeros(right.shape), right))
    assert measured["near"] == 1 and measured["far"] == 0
    assert measured["accuracy"] == right.sum() / (batch.targets != NOTHING).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 9}, "pairs must be from 1 to keys=8"),
        ({"vocabulary": 9}, "vocabulary must be at least 10, with 2 symbols"),
        ({"share": 0.0}, "share must be above 0"),
        ({"distance": 600}, "leave no question in 256 tokens"),
        ({"distance": 1, "share": 1.0}, "leave no near target in 256 tokens"),
        ({"distance": 0, "share": 1.0}, "leave no near target in 256 tokens"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TASK, **options)


def test_the_smallest_number_of_near_targets_is_one():
    task = dataclasses.replace(TINY, distance=2, share=1.0)
    assert (task.is_near(task.training(8, 0, 0)).sum(1) == 1).all()


def model_of(**mixer):
    config = TransformerConfig(
        vocab_size=TINY.vocab_size, num_layers=1, features=8, num_heads=2, mixer=mixer
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    if mixer["name"] == "mixture_of_mechanisms":
        model.blocks[0].mixer.choose.bias[...] = jnp.array([0.0, 9.0])
    return model


def of(**mixer):
    return TINY.sample(model_of(**mixer), 0)


def test_a_sample_leaves_the_model_as_it_is():
    window = {"name": "sliding_window", "local_window_size": (3, 0)}
    model = model_of(name="mixture_of_mechanisms", mechanisms=(window, "softmax"))
    before = model.blocks[0].mixer.costs
    TINY.sample(model, 0)
    assert model.blocks[0].mixer.costs is before


def test_samples_tell_the_cost_and_who_attends_exactly():
    window = {"name": "sliding_window", "local_window_size": (3, 0)}
    mixture = {"name": "mixture_of_mechanisms", "mechanisms": (window, "softmax"), "gate": "top1"}
    exact, near, all_, half = (
        of(name="softmax"),
        of(**window),
        of(**mixture),
        of(**mixture, capacity=0.5),
    )
    for found, share in ((exact, 1), (near, 0), (all_, 1)):
        assert found["near_exact_share"] == found["far_exact_share"] == share
    assert 0.3 < half["near_exact_share"] < 0.6
    assert near["operations"] < half["operations"] < all_["operations"]
