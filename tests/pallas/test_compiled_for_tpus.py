"""Kernels for TPUs, compiled by the compiler for TPUs, which needs no TPU."""

import os
import subprocess
import sys

import pytest

from tests.marks import slow

pytest.importorskip("libtpu", reason="needs the libtpu package, which compiles the kernels")

# The number of kernels in the program of the gradients of a call. Forward kernels of recurrences
# save nothing for the gradients, so this program does without them.
KERNELS = {
    "size 64": 3,
    "size 256": 3,
    "many packed rows": 3,
    "many tables": 1,
    "decay of the token": 2,
    "decays of features": 2,
    "as many heads as fit": 2,
    "as many features as fit": 2,
    "delta rule": 2,
    "the largest delta rule": 2,
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("topology", [slow("v4:2x2x1"), "v5e:2x2", slow("v6e:2x2")])
def test_they_fit_in_the_memory_of_a_core(topology, name):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    command = [sys.executable, "-m", "tests.pallas.compile_tpu", topology, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(KERNELS[name]), done.stderr
