import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.harness import checkpoints as module
from experiments.harness.checkpoints import Checkpoints
from experiments.harness.errors import UserError

STATE = {"w": jnp.arange(3.0), "inner": (jnp.int32(4), [jnp.ones((2, 2), jnp.bfloat16)])}
LATER = jax.tree.map(lambda leaf: leaf + 1, STATE)


def written(folder, *states):
    """Writes the states as checkpoints of the steps 1, 2, ... and returns the newest's folder."""
    with Checkpoints(folder, "me") as checkpoints:
        for step, state in enumerate(states, 1):
            checkpoints.save(step, state, {"seconds": step})
    return folder / str(len(states))


def restored(folder, template=STATE, identity="me"):
    """Returns what `restore` returns, and its warnings."""
    warnings = []
    with Checkpoints(folder, identity) as checkpoints:
        return checkpoints.restore(template, warnings.append), warnings


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_arrays_and_progress_come_back_and_the_last_two_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest is None
        assert checkpoints.restore(STATE, pytest.fail) is None
        for step in (3, 5, 8):
            checkpoints.save(step, STATE, {"seconds": step / 2})
            assert checkpoints.latest == step
    (step, state, progress), warnings = restored(tmp_path / "c")
    assert (step, progress, warnings) == (8, {"seconds": 4.0}, [])
    assert_same(state, STATE)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["5", "8"]


def test_saved_arrays_may_be_changed_at_once(tmp_path):
    state = {"w": np.arange(3, dtype=np.float32)}
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        checkpoints.save(1, state, {})
        state["w"][:] = 0
    (_, found, _), _ = restored(tmp_path / "c", {"w": jnp.zeros(3)})
    np.testing.assert_array_equal(found["w"], [0, 1, 2])


def test_equal_states_have_equal_digests(tmp_path):
    def digests(name, state):
        path = written(tmp_path / name, state) / "progress" / "metadata"
        content = json.loads(path.read_text())
        return content["state"], content["arrays"]

    state, arrays = digests("one", STATE)
    assert digests("two", jax.tree.map(np.asarray, STATE)) == (state, arrays)
    other, others = digests("three", {**STATE, "w": jnp.asarray([0, 1, 2.0000002])})
    assert other != state
    assert [name for name in arrays if arrays[name] != others[name]] == ["['w']"]
    assert arrays["['inner'][1][0]"].items() >= {"dtype": "bfloat16", "shape": [2, 2]}.items()


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    newest = written(tmp_path / "c", STATE)
    with pytest.raises(UserError, match="written with another configuration"):
        restored(tmp_path / "c", identity="you")
    assert newest.is_dir()


@pytest.mark.parametrize(
    "template",
    [{**STATE, "w": jnp.ones(4)}, {**STATE, "w": jnp.arange(3)}, {**STATE, "v": jnp.ones(3)}, {}],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, template):
    newest = written(tmp_path / "run" / "c", STATE)
    with pytest.raises(UserError, match=r"another array .* than .*c/1; delete .*run to train"):
        restored(tmp_path / "run" / "c", template)
    assert newest.is_dir()


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    path = written(tmp_path / "run" / "c", STATE) / "progress" / "metadata"
    path.write_text('{"identity": "me", "record": {}}')
    with pytest.raises(UserError, match=r"earlier version wrote .*c/1, .*; delete .*run to train"):
        restored(tmp_path / "run" / "c")


def flipped(data):
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_read(tmp_path):
    good = written(tmp_path / "good", LATER, STATE, LATER)
    files = [path.relative_to(good) for path in good.rglob("*") if path.is_file()]
    fell_back = set()
    for damage in (flipped, lambda data: data[: len(data) // 2], lambda data: b""):
        for file in files:
            folder = shutil.copytree(good.parent, tmp_path / "c")
            (folder / "3" / file).write_bytes(damage((good / file).read_bytes()))
            (step, state, progress), warnings = restored(folder)
            # Some files of Orbax are not needed to read the arrays.
            assert_same(state, STATE if step == 2 else LATER)
            assert progress == {"seconds": step}
            if step == 2:
                fell_back.add(file.parts[0])
                warning, then = warnings
                assert warning.startswith(f"the checkpoint {folder / '3'} is damaged (")
                assert warning.endswith("renamed to 3.damaged")
                assert then == "training goes on from the checkpoint of step 2"
                assert "\n" not in warning and '"' not in warning
                assert "tensorstore_spec" not in warning and "TensorStore details" not in warning
                assert (folder / "3.damaged").is_dir()
            shutil.rmtree(folder)
    assert fell_back == {"state", "progress"}


def test_every_flipped_bit_of_an_array_is_found(tmp_path):
    noise = {"w": jnp.asarray(np.random.default_rng(0).normal(size=2000), jnp.float32)}
    newest = written(tmp_path / "c", noise)
    (data,) = (path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 7000)
    good, draw = data.read_bytes(), np.random.default_rng(1)
    for place in draw.integers(100, 7000, size=5):
        changed = bytearray(good)
        changed[place] ^= 1 << draw.integers(8)
        data.write_bytes(bytes(changed))
        found, warnings = restored(tmp_path / "c", noise)
        assert found is None and len(warnings) == 2
        shutil.move(tmp_path / "c" / "1.damaged", newest)


def test_training_starts_anew_if_no_checkpoint_is_whole(tmp_path):
    newest = written(tmp_path / "c", STATE, STATE)
    shutil.rmtree(newest / "state")
    shutil.rmtree(newest.with_name("1"))
    newest.with_name("1").mkdir()
    found, warnings = restored(tmp_path / "c")
    assert found is None
    assert [warning.partition(" (")[0] for warning in warnings] == [
        f"the checkpoint {newest} is damaged",
        f"the checkpoint {newest.with_name('1')} is damaged",
        f"no checkpoint in {tmp_path / 'c'} is whole; training starts anew",
    ]
    written(tmp_path / "c", LATER)
    (step, state, _), warnings = restored(tmp_path / "c")
    assert (step, warnings) == (1, [])
    assert_same(state, LATER)


def test_a_checkpoint_that_the_disk_has_no_room_for_is_one_sentence(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    noise = np.random.default_rng(0).normal(size=20_000)
    sentence = r"c/2 cannot be written \(.*\); the same"
    try:
        with pytest.raises(UserError, match=sentence) as caught:
            with Checkpoints(tmp_path / "c", "me") as checkpoints:
                checkpoints.save(1, STATE, {})
                checkpoints.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
                checkpoints.save(2, {"w": noise}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("File too large); the same") == 1
    assert capsys.readouterr().err == ""
    (step, state, _), warnings = restored(tmp_path / "c")
    assert (step, warnings) == (1, [])
    assert_same(state, STATE)


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path):
    written(tmp_path / "c", STATE)
    torn = tmp_path / "c" / "2.orbax-checkpoint-tmp"
    torn.mkdir()
    with Checkpoints(tmp_path / "c", "me") as checkpoints:
        assert checkpoints.latest == 1
        checkpoints.save(2, STATE, {})
        assert checkpoints.latest == 2
    assert not torn.exists()


def test_runs_side_by_side_write_at_the_same_time(tmp_path):
    start, failed = threading.Barrier(3), []

    def write(name):
        try:
            with Checkpoints(tmp_path / name, "me") as checkpoints:
                for step in range(1, 4):
                    start.wait(timeout=60)
                    checkpoints.save(step, STATE, {})
        except Exception as error:
            failed.append(error)
            start.abort()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [restored(tmp_path / name)[0][0] for name in "abc"] == [3, 3, 3]


@pytest.mark.devices
def test_arrays_are_restored_with_the_sharding_of_the_template(tmp_path):
    def sharded(count):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return {"w": jax.device_put(jnp.arange(16.0), sharding)}

    written(tmp_path / "c", sharded(4))
    for count in (8, 4, 1):
        template = sharded(count)
        (_, state, _), warnings = restored(tmp_path / "c", template)
        assert state["w"].sharding == template["w"].sharding and not warnings
        np.testing.assert_array_equal(state["w"], np.arange(16.0))


def test_errors_that_a_failed_read_repeats_are_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    monkeypatch.setattr(threading, "excepthook", shown.append)
    module._quiet_threads()
    closed, other = RuntimeError("Event loop is closed"), RuntimeError("another")
    for error in (closed, other):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error, object=None))
    assert [each.exc_value for each in shown] == [other]


@pytest.mark.slow
def test_a_process_that_meets_damage_says_nothing_else(tmp_path):
    code = """
import sys
from pathlib import Path
import jax.numpy as jnp
from experiments.harness.checkpoints import Checkpoints

folder, state = Path(sys.argv[1]), {str(i): jnp.arange(9e4) + i for i in range(40)}
with Checkpoints(folder, "me") as checkpoints:
    checkpoints.save(1, state, {})
for path in folder.rglob("*"):
    if path.is_file() and path.stat().st_size > 10_000:
        path.write_bytes(bytes(path.stat().st_size))
with Checkpoints(folder, "me") as checkpoints:
    checkpoints.restore(state, print)
"""
    for attempt in "abc":  # TensorStore reports the other errors or not
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / attempt)], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout.splitlines()) == 2
