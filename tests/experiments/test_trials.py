import json

import numpy as np
import pytest

from experiments.harness import trials
from experiments.harness.errors import UserError
from experiments.harness.programs import Programs
from experiments.harness.schedules import Schedule
from experiments.harness.trials import Trials
from experiments.tasks.tokenizers import ByteTokenizer


class Objective:
    """Objective with empty prompts and without samples."""

    def prompt(self, window, tokenizer):
        return ""

    def sample(self, model, window, tokenizer, seed):
        return None


class Data:
    valid = np.zeros((1, 5), np.uint8)
    objective = Objective()


@pytest.fixture
def one(tmp_path, monkeypatch, lines):
    """Returns trials whose final loss in nats equals the learning rate."""

    def train(run, *_):
        run.folder.mkdir()
        record = {"valid_loss": run.learning_rate, "bits_per_byte": run.learning_rate}
        return {}, {**record, "tokens": 8, "seconds": 2.0}

    monkeypatch.setattr(trials, "train", train)
    programs = Programs(*[lambda *_: None] * 4, parameters=1, temporary_bytes=2, state_bytes=3)
    tokenizer = ByteTokenizer()
    return Trials(
        tmp_path, "me", Schedule(4, 2, 1, 2), Data(), tokenizer, 5.0, lambda _: programs, lines
    )


def test_perplexities_are_exponentials_of_the_loss(one):
    result = one.run("softmax", 2.0, 0)
    assert result["perplexity"] == pytest.approx(np.e**2)
    assert result["word_perplexity"] == 2.0**10


def test_a_perplexity_beyond_a_float_is_none_and_written_as_json_has_it(one):
    result = one.run("softmax", 1e4, 0)
    assert result["perplexity"] is None and result["word_perplexity"] is None
    text = (one.folder / result["folder"] / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == result


@pytest.mark.parametrize("content", ["", "{}", "null", '{"mecha'])
def test_a_damaged_result_is_one_sentence(one, content):
    result = one.run("softmax", 2.0, 0)
    (one.folder / result["folder"] / "result.json").write_text(content)
    with pytest.raises(UserError, match=r"result\.json is damaged; delete .* measure that run"):
        one.run("softmax", 2.0, 0)
