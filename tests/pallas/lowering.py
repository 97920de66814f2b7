"""Kernels lowered for GPUs on a machine that has none."""

import contextlib
import re
from typing import Any

import jax
from jax import export

KERNELS = "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "tpu_custom_call"


def kernels_of(function: Any, *arguments: Any, platform: str = "cuda") -> set[str]:
    """What the program calls of kernels, lowered for a platform."""
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    with _a_device():
        exported = export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(
            *arguments
        )
    return set(re.findall(r"custom_call @([\w$.]+)", exported.mlir_module())) & set(KERNELS)


def _a_device():
    """Newer versions of JAX ask for which device Triton's kernels are."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("_",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
