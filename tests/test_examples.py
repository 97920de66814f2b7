"""The scripts in `examples/`: each is short, runs as a program, and shows what its text says."""

import os
import pathlib
import subprocess
import sys

import pytest

import effattn

ROOT = pathlib.Path(effattn.__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("examples/*.py"))

# A part of what each script prints.
SHOWN = {
    "byte_lm_gated_deltanet": "def ",
    "dna_hyena_64k": "one table of all pairs of bases, in float32: 17,180 MB",
    "encoder_longformer": "largest change by other padding: 0.0",
    "images_2d_window": "1024 x 1024 tokens",
    "own_mechanism": "all laws hold",
    "sharding_over_devices": "tokens of a device: 2048 of 16384",
    "streamed_generation": "Thursday Friday Saturday Sunday Monday Tuesday",
}

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="installed without its examples")


def test_what_every_script_shows_is_listed():
    assert [script.stem for script in SCRIPTS] == sorted(SHOWN)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_has_fewer_than_80_lines(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.slow  # the build of the site runs them too
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_and_shows_what_it_says(script, tmp_path):
    pytest.importorskip("matplotlib")
    settings = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | settings,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[script.stem] in done.stdout
