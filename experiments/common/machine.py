"""The machine that an experiment runs on."""

import os
import platform


def environment() -> dict[str, str]:
    """The machine and the versions that numbers come from."""
    import jax

    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": str(cores()),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def runs_at_once() -> int:
    """How many small models to train beside each other.

    The products of one are too small to keep two cores busy, and a third run fills what two leave
    idle. An accelerator is best left to one.
    """
    import jax

    return 3 if jax.default_backend() == "cpu" and (cores() or 1) > 1 else 1
