"""Checks of the options, before any file is read or written."""

import dataclasses
import re
import traceback
from collections.abc import Callable
from typing import Any

from experiments.harness import outcome
from experiments.harness.errors import UserError
from experiments.harness.naming import REFERENCE

# Step counts and seeds are int32.
MOST = 2**31 - 1

# Axes of a mesh that training uses: layers; rows; rows and parameters; rows and experts; tokens;
# heads and hidden features.
MESH_AXES = "stage", "data", "fsdp", "expert", "sequence", "tensor"

# Range of positive normal float32 numbers.
LEAST_FLOAT, MOST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_training(config: Any) -> None:
    """Raises `UserError` if the options of `experiments.harness.options` do not fit together."""
    check_counts(config, "layers", "width", "heads", "batch", "accumulate", "steps")
    for name in ("window", "key_heads", "evaluate_every", "at_once"):
        if getattr(config, name) is not None:
            check_counts(config, name)
    if config.redraw:
        check_counts(config, "redraw")
    for name in ("mechanisms", "seeds"):
        values = getattr(config, name)
        require(len(values) > 0, config, name, "needs at least one value")
        require(len(set(values)) == len(values), config, name, "must not repeat a value")
    check_seeds(config)
    require(bool(config.mesh or not config.processes), config, "processes", "needs --mesh")
    if config.mesh:
        mesh_sizes(config.mesh)
        good = config.at_once in (None, 1)
        require(good, config, "at_once", "must be 1 with --mesh: a run has all devices")
    good = not config.first_layer or config.layers > 1
    require(good, config, "layers", "must be at least 2 with --first-layer")
    good = config.width % config.heads == 0
    require(good, config, "width", f"must be a multiple of --heads {config.heads}")
    good = config.positions not in (None, "rotary") or config.width // config.heads % 2 == 0
    text = f"must divide --width {config.width} into even head sizes, for rotary positions"
    require(good, config, "heads", text)
    if config.key_heads is not None:
        good = config.heads % config.key_heads == 0
        require(good, config, "key_heads", f"must divide --heads {config.heads}")
    _check_experts(config)
    good = config.batch % config.accumulate == 0
    require(good, config, "batch", f"must be a multiple of --accumulate {config.accumulate}")
    check_positive(config, "clip", "sweep")
    if config.learning_rate is not None:
        check_positive(config, "learning_rate")
    require(len(set(config.sweep)) == len(config.sweep), config, "sweep", "must not repeat a rate")
    both = config.sweep and config.learning_rate is not None
    require(not both, config, "sweep", "must be left out if --learning-rate is given")
    require(0 <= config.warmup < 1, config, "warmup", "must be a fraction from 0 to below 1")
    good = 0 <= config.weight_decay <= MOST_FLOAT
    require(good, config, "weight_decay", "must be 0 or positive, and finite in float32")


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the sizes of a mesh: `{"data": 2, "tensor": 4}` of "data=2,tensor=4".

    Raises:
      UserError: the text has another form, or another axis.
    """
    found = [re.fullmatch(r"(\w+)=(-?\d+)", part) for part in text.split(",")]
    sizes = {match[1]: int(match[2]) for match in found if match}
    if len(sizes) < len(found) or not sizes.keys() <= {*MESH_AXES}:
        raise UserError(
            f"--mesh must be like data=2,tensor=4, with axes among {', '.join(MESH_AXES)}; "
            f"got {text!r}"
        )
    return sizes


def _check_experts(config: Any) -> None:
    if config.experts is None:
        for name in ("experts_per_token", "expert_capacity", "shared_experts"):
            usual = getattr(config, name) == type(config).__dataclass_fields__[name].default
            require(usual, config, name, "must be left out without --experts")
        return
    check_counts(config, "experts", "experts_per_token")
    good = config.experts_per_token <= config.experts
    require(good, config, "experts_per_token", f"must be at most --experts {config.experts}")
    if config.expert_capacity is not None:
        check_positive(config, "expert_capacity")
    require(config.shared_experts >= 0, config, "shared_experts", "must not be negative")
    need = "must be left out, because this experiment adds the costs of mechanisms to the loss"
    require(not config.with_costs, config, "experts", need)


def check_mesh_of_recovery(config: Any) -> None:
    """Raises `UserError` unless models that start from a trained one can be made on the mesh."""
    sizes = mesh_sizes(config.mesh) if config.mesh else {}
    need = "must have no axis stage, as models with stages cannot be converted"
    require(sizes.get("stage", 1) == 1, config, "mesh", need)
    need = "must be left out, as this experiment runs in one process"
    require(not config.processes, config, "processes", need)


def check_counts(config: Any, *names: str) -> None:
    """Raises `UserError` unless these options are positive int32 numbers."""
    for name in names:
        require(getattr(config, name) >= 1, config, name, "must be at least 1")
        require(getattr(config, name) <= MOST, config, name, f"must be at most {MOST}")


def check_positive(config: Any, *names: str) -> None:
    """Raises `UserError` unless all values of these options are positive and finite in float32."""
    for name in names:
        value = getattr(config, name)
        values = value if isinstance(value, tuple) else (value,)
        good = all(LEAST_FLOAT <= each <= MOST_FLOAT for each in values)
        require(good, config, name, "must be positive and finite in float32")


def check_seeds(config: Any) -> None:
    """Raises `UserError` unless all seeds are valid for `jax.random.key`."""
    require(min(config.seeds) >= 0, config, "seeds", "must not be negative")
    require(max(config.seeds) <= MOST, config, "seeds", f"must be at most {MOST}")


def check_mechanism(option: str, text: str, trial: Callable[[], None]) -> None:
    """Raises `UserError` if a mechanism cannot be used.

    Args:
      option: command-line option that names the mechanism.
      text: value of the option.
      trial: builds a model with the mechanism and traces a call of the model.
    """
    try:
        trial()
    except (UserError, OSError):  # of the data
        raise
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
    # Options are any Python literals, for some of which JAX and NumPy raise other errors.
    except (TypeError, OverflowError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{option}: {text} cannot be run here ({reason})") from None
    # A mechanism of the user's own may raise any error.
    except Exception as error:
        if outcome.out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{option}: {text} cannot be run here ({reason}, at {last.filename}:{last.lineno})"
        ) from error


def require(good: bool, config: Any, name: str, need: str) -> None:
    """Raises `UserError` with the need and the value of an option, unless it is good."""
    if not good:
        value = getattr(config, name)
        shown = " ".join(map(str, value)) or "none" if isinstance(value, tuple) else value
        raise UserError(f"--{name.replace('_', '-')} {need}, got {shown}")


def check_mechanisms(config: Any, task: Any) -> dict[str, str]:
    """Tries a model of each mechanism.

    Returns:
      For mechanisms that `all` stands for and that cannot be built or called, the reasons by name.

    Raises:
      UserError: another mechanism cannot be built or called.
    """
    # Imported late: --help and bad input need not wait for JAX.
    from experiments.harness import meshes, models

    if config.mesh:
        meshes.check(config, task)
    fixed = config.fixed_mechanisms()
    plain = {name: type(config).__dataclass_fields__[name].default for name in fixed}
    for option, text in fixed.items():
        alone = dataclasses.replace(config, **{**plain, option: text, "equal_parameters": False})

        def build(text: str = text, alone: Any = alone) -> None:
            models.check_call(text, models.builder(REFERENCE, alone, task), task)

        check_mechanism(f"--{option.replace('_', '-')}", text, build)
    left_out = {}
    for text in config.with_all().mechanisms:

        def trial(text: str = text) -> None:
            build = models.builder(text, config, task)
            models.check_call(text, build, task, bool(config.imports))
            if config.mesh:
                meshes.check_model(config, build, task)

        try:
            check_mechanism("--mechanisms", text, trial)
        except UserError as error:
            if text in config.mechanisms:
                raise
            left_out[text] = str(error).removeprefix("--mechanisms: ")
    if len(left_out) == len(config.with_all().mechanisms):
        name, reason = next(iter(left_out.items()))
        raise UserError(f"--mechanisms: no mechanism fits; {name}: {reason}")
    return left_out
