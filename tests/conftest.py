"""What all tests share: eight virtual devices, quick compilation, hypothesis that draws alike."""

import gc
import itertools
import os
import pathlib
from importlib import metadata

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

from effattn import tuned

pytest_plugins = ["tests.laws.seconds"]

# Before any test asks for a device. All but the tests of sharding run on the first.
jax.config.update("jax_num_cpu_devices", 8)

# Most programs run once or twice: the same fusions and buffers, with less work on the code of each.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the programs that tests start, too
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    # XLA had another emitter then, which takes a third of the time.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"

settings.register_profile(
    "effattn",
    derandomize=True,
    deadline=None,
    # A smaller example of a failure would cost a compilation for each that is tried.
    phases=(Phase.explicit, Phase.generate),
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("effattn")


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch, tmp_path):
    """No test sees, or changes, what was tuned on this machine."""
    monkeypatch.setattr(tuned, "cache_file", lambda: tmp_path / "cache" / "tuning.json")
    tuned.measured.cache_clear()
    tuned.warn_once.cache_clear()


_MAPS, _MOST_MAPS = pathlib.Path("/proc/self/maps"), 30_000
_tests = itertools.count(1)


def pytest_runtest_teardown(item):
    """Compiled programs stay mapped into memory, where Linux gives a process 65,530 pieces.

    One piece more, and the next compilation ends the process. A test takes a few hundred.
    """
    if next(_tests) % 10 == 0 and _MAPS.exists():
        if _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
            jax.clear_caches()
            gc.collect()
