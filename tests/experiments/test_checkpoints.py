import resource
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.checkpoints import Checkpoints
from experiments.harness.errors import UserError

STATE = {"w": jnp.arange(3.0), "inner": (jnp.int32(4), [jnp.ones((2, 2))])}


def test_arrays_and_progress_come_back(tmp_path):
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(3, STATE, {"seconds": 1.5})
        checkpoints.save(5, STATE, {"seconds": 2.5})
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest == 5
        state, progress = checkpoints.restore(STATE)
    assert progress == {"seconds": 2.5}
    np.testing.assert_array_equal(state["w"], STATE["w"])
    assert state["inner"][0] == 4 and state["inner"][0].dtype == jnp.int32
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["5"]


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        checkpoints.save(1, STATE, {})
    with Checkpoints(tmp_path / "c", "you") as checkpoints:
        with pytest.raises(UserError, match="written with another configuration"):
            checkpoints.restore(STATE)
    assert (tmp_path / "c" / "1").is_dir()


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    with Checkpoints(tmp_path / "run" / "c", "me") as checkpoints:
        checkpoints.save(1, STATE, {})
    for path in (tmp_path / "run" / "c" / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damage")
    with Checkpoints(tmp_path / "run" / "c", "me") as checkpoints:
        with pytest.raises(UserError, match="cannot be read .*; delete .*run to train") as caught:
            checkpoints.restore(STATE)
    assert "\n" not in str(caught.value) and "tensorstore_spec" not in str(caught.value)


def test_progress_that_lacks_something_is_one_sentence(tmp_path):
    with Checkpoints(tmp_path / "run" / "c", "me") as checkpoints:
        checkpoints.save(1, STATE, {"seconds": 1.5})
        with pytest.raises(UserError, match="cannot be read .it lacks order.; delete .*run to"):
            checkpoints.restore(STATE, ("seconds", "order"))


def test_a_checkpoint_that_the_disk_has_no_room_for_is_one_sentence(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    noise = np.random.default_rng(0).normal(size=20_000)
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        checkpoints.save(1, STATE, {})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            with pytest.raises(
                UserError, match=r"c/2 cannot be written \(.*\); the same"
            ) as caught:
                checkpoints.save(2, {"w": noise}, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("File too large); the same") == 1
    assert capsys.readouterr().err == ""
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest == 1


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path):
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        checkpoints.save(1, STATE, {})
    torn = tmp_path / "c" / "2.orbax-checkpoint-tmp"
    torn.mkdir()
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest == 1
        checkpoints.save(2, STATE, {})
        assert checkpoints.latest == 2
    assert not torn.exists()
