"""Optimisers with gradient clipping, warm-up and decay, for a peak learning rate of 1.

The training step multiplies the updates by the learning rate. The learning rate is therefore an
argument of the compiled program, and a sweep compiles only once.
"""

from typing import Any

import jax
import optax
import optax.contrib

ADAM_BETAS = (0.9, 0.95)


def make_optimiser(
    name: str, steps: int, warmup: float, clip: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns the optimiser of a run, whose updates are for a peak learning rate of 1.

    Args:
      name: "adamw" (Loshchilov and Hutter 2019), or "muon" (Jordan et al. 2024), which
        orthogonalises the updates of matrices and uses Adam for embeddings and norms.
      steps: length of the schedule: linear warm-up, then cosine decay to 0.
      warmup: fraction of the steps in the warm-up.
      clip: largest global gradient norm.
      weight_decay: decoupled weight decay of kernels.
    """
    warmup_steps = max(1, round(warmup * steps))
    schedule = optax.schedules.warmup_cosine_decay_schedule(
        init_value=1 / warmup_steps,
        peak_value=1.0,
        warmup_steps=warmup_steps,
        decay_steps=max(steps, warmup_steps + 1),
    )
    b1, b2 = ADAM_BETAS
    if name == "adamw":
        inner = optax.adamw(schedule, b1, b2, weight_decay=weight_decay, mask=_kernels)
    else:
        inner = optax.contrib.muon(
            schedule,
            weight_decay=weight_decay,
            adam_b1=b1,
            adam_b2=b2,
            muon_weight_dimension_numbers=_muon_axes,
        )
    return optax.chain(optax.clip_by_global_norm(clip), inner)


def _kernels(params: Any) -> Any:
    return jax.tree.map(lambda axes: axes is not None, _muon_axes(params), is_leaf=_is_axes)


def _muon_axes(params: Any) -> Any:
    """Returns the input and output axes of each kernel; None for parameters that are no kernels.

    Projections to heads are `(D, N, H)`. Projections from heads, named `out`, are `(N, H, D)`. The
    kernels of several experts are `(E, D, F)`, each a matrix of its own. The arrays of stages have
    an additional leading axis, of the stages.
    """

    def axes(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        keys = [getattr(key, "key", None) for key in path]
        numbers = tuple(range("stages" in keys, leaf.ndim))
        if keys[-1] in ("gate_kernels", "up_kernels", "down_kernels"):
            return optax.contrib.MuonDimensionNumbers(numbers[1:2], numbers[2:])
        if keys[-1] != "kernel":
            return None
        inputs = len(numbers) - 1 if keys[-2] == "out" else 1
        return optax.contrib.MuonDimensionNumbers(numbers[:inputs], numbers[inputs:])

    return jax.tree_util.tree_map_with_path(axes, params)


def _is_axes(node: Any) -> bool:
    return node is None or isinstance(node, optax.contrib.MuonDimensionNumbers)
