import pytest

from experiments import bare
from experiments.tasks.parity import Parity

SHORT = Parity(trained=(2, 6), tested=((12, 12),), held_out_size=64, intermediate=True)
SIZES = "--layers 1 --width 32 --heads 2 --rate 0.01 --steps 100".split()


@pytest.fixture(autouse=True)
def short_task(monkeypatch):
    monkeypatch.setitem(bare.TASKS, "parity", {"small": SHORT})


def table(capsys) -> dict[str, list[float]]:
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()[2:]
    return {line[:20].strip(): [float(word) for word in line[20:].split()] for line in lines}


def test_an_lstm_learns_parity_and_goes_on_beyond_its_training(capsys):
    assert bare.main(["lstm", *SIZES]) == 0
    rows = table(capsys)
    assert list(rows) == ["2 to 6 tokens", "12 tokens"]
    for loss, accuracy, exact, scaled in rows.values():
        assert loss < 0.1 and accuracy == exact == scaled == 1


def test_options_reach_the_mechanism():
    config = bare.parse(["delta_net", "allow_negative_eigenvalues=True", *SIZES])
    assert bare.build(config, SHORT).blocks[0].mixer.max_strength == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nope"], "unknown mechanism 'nope'"),
        (["lstm", "size"], "option size must be a Python literal"),
        (["lstm", "size=3"], "has no option size"),
    ],
)
def test_what_is_no_mechanism_is_one_sentence(given, sentence):
    with pytest.raises(SystemExit, match=f"^error: .*{sentence}"):
        bare.main(given)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", "-1"), ("batch", "0"), ("steps", "-1"), ("rate", "nan")]
)
def test_impossible_numbers_are_one_sentence(name, value, capsys):
    with pytest.raises(SystemExit) as end:
        bare.main(["lstm", f"--{name}", value])
    assert end.value.code == 2
    assert f"--{name} must be at least" in capsys.readouterr().err


def test_one_step_and_long_examples_in_smaller_batches(monkeypatch, capsys):
    sizes, score = [], bare.score

    def counted(model, batch):
        sizes.append(batch.targets.shape)
        return score(model, batch)

    monkeypatch.setattr(bare, "score", counted)
    assert bare.main(["lstm", *SIZES, "--batch", "16", "--steps", "1"]) == 0
    assert sizes == [(16, 6), (16, 6), (8, 12)]
    assert len(table(capsys)) == 2
