import functools
import os
import subprocess
import sys

import pytest

import effattn

MEASURE = """
import gc, sys, time
gc.disable()  # a collection would search the objects of JAX, for longer than the import takes
sys.pycache_prefix = sys.argv[1]
start = time.process_time()
import jax.numpy
middle = time.process_time()
before = set(sys.modules)
import effattn
print((time.process_time() - middle) / (middle - start))
print(*sorted(set(sys.modules) - before))
"""


MOST_PROCESSES = 25


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """A function that imports effattn in a fresh process, for its time and newly loaded modules.

    The time is processor time, as a multiple of that of `import jax.numpy`. The processes use
    bytecode, as pip installs it; the first process writes the bytecode.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = functools.partial(
        subprocess.run, check=True, capture_output=True, text=True, env=environment
    )
    command = [sys.executable, "-c", MEASURE, str(tmp_path_factory.mktemp("bytecode"))]

    def measure():
        multiple, modules = run(command).stdout.splitlines()
        return float(multiple), modules.split()

    measure()
    return measure


def test_is_quick(imported):
    # On a busy machine most of the processes take longer.
    multiples = (imported()[0] for _ in range(MOST_PROCESSES))
    assert any(multiple < 0.2 for multiple in multiples)


def test_loads_nothing_heavy(imported):
    _, modules = imported()
    assert "effattn" in modules
    heavy = {"flax", "optax", "chex", "llvmlite", "matplotlib", "triton", "pallas"}
    assert [module for module in modules if heavy & {*module.split(".")}] == []
    assert not {"effattn.nn", "effattn.decode", "effattn.analysis"} & {*modules}


def test_all_public_names_are_there():
    assert [name for name in effattn.__all__ if not hasattr(effattn, name)] == []
    assert set(effattn.__all__) <= set(dir(effattn))


def test_modules_of_flax_come_on_first_use():
    assert effattn.nn.__name__ == "effattn.nn"
    assert effattn.decode.__name__ == "effattn.decode"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        effattn.flash_attention  # noqa: B018
