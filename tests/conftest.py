"""Settings of the whole suite: one CPU device, quick compilation, reproducible hypothesis draws.

Tests run on one device, as most users' programs do, so that they test the implementation that is
the default there. Tests of sharding are marked `devices` and run in a process of their own, with
`pytest --devices 8 -m devices`.
"""

import functools
import hashlib
import itertools
import os
import pathlib
import platform
import re
import tempfile
from importlib import metadata

import jax
import platformdirs
import pytest
from hypothesis import HealthCheck, Phase, settings

from effattn.dispatch import cache
from experiments.harness import machine

pytest_plugins = ["tests.laws.seconds", "tests.slow"]

# Most programs run once or twice, so the compiler spends less work on the code of each fusion. The
# fusions and the buffers stay the same.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the programs that tests start
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    # Before jaxlib 0.11, XLA also has an older emitter, which takes a third of the time.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"


def compiled_programs() -> str:
    """Folder of compiled programs, which depend on the kind of processor and belong to one user."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    kind = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    name = hashlib.sha256("".join([platform.machine(), *kind]).encode()).hexdigest()[:12]
    try:
        folder = platformdirs.user_cache_path("effattn")
    except RuntimeError:  # a user without a home folder
        folder = pathlib.Path(tempfile.gettempdir()) / f"effattn-{os.getuid()}"
    return str(folder / "tests" / name)


# Most of the time is compilation, so programs of an earlier run or of another worker are reused.
_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": compiled_programs(),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.update(_CACHE)  # for the programs that tests start
    jax.config.update("jax_compilation_cache_dir", _CACHE["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser):
    parser.addoption(
        "--devices",
        type=int,
        default=1,
        help="number of virtual CPU devices; tests marked `devices` need 8, and are skipped below",
    )


def pytest_configure(config):
    # The number of devices must be set before any test, or their collection, asks for a device.
    jax.config.update("jax_num_cpu_devices", config.getoption("--devices"))


def pytest_ignore_collect(collection_path, config):
    """Leaves out files without tests of several devices if only such tests run."""
    only = re.search(r"(?<!not )\bdevices\b", config.option.markexpr)
    is_test = collection_path.suffix == ".py"
    return True if only and is_test and not _names_devices(collection_path) else None


@functools.cache
def _names_devices(path):
    return "devices" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(config, items):
    count = config.getoption("--devices")
    skip = pytest.mark.skip(reason=f"needs 8 devices, not {count}: pytest --devices 8")
    for item in items:
        if item.get_closest_marker("devices"):
            if not _names_devices(item.path):  # then `pytest_ignore_collect` would leave it out
                raise pytest.UsageError(f"write pytest.mark.devices in {item.path} itself")
            if count < 8:
                item.add_marker(skip)


def pytest_sessionfinish(session, exitstatus):
    """Accepts a run without tests, because `make test ARGS=...` may select no test of devices."""
    nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing and session.config.getoption("--devices") > 1:
        session.exitstatus = pytest.ExitCode.OK


settings.register_profile(
    "effattn",
    derandomize=True,
    deadline=None,
    # Shrinking a failing example would compile one program for each smaller example.
    phases=(Phase.explicit, Phase.generate),
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("effattn")


_folders = itertools.count()


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch, tmp_path_factory):
    """Hides the tuning results of this machine from every test, and protects them from changes."""
    # A name of its own: `tmp_path` would make a folder for each of ten thousand tests.
    folder = tmp_path_factory.getbasetemp() / f"tuning-{next(_folders)}"
    monkeypatch.setattr(cache, "cache_file", lambda: folder / "tuning.json")
    cache.measured.cache_clear()
    cache.warn_once.cache_clear()


@pytest.fixture
def x64():
    """Arrays of 64 bits."""
    with jax.enable_x64(True):
        yield


_tests = itertools.count(1)


def pytest_runtest_teardown(item):
    """Drops compiled programs before they use up the memory mappings of the process."""
    if next(_tests) % 10 == 0 and machine.is_full():
        machine.forget_programs()
