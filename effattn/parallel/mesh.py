"""Meshes with the names of axes that effattn uses."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

# From the slowest links to the fastest: neighbours along the last axis exchange most.
AXES = "stage", "data", "fsdp", "expert", "sequence", "tensor"


def make_mesh(
    *,
    devices: Sequence[jax.Device] | None = None,
    axis_type: AxisType = AxisType.Auto,
    **sizes: int,
) -> Mesh:
    """Makes a mesh whose axes have the names of `AXES`, in that order.

    Args:
      devices: devices of the mesh; default all of this program.
      axis_type: type of all axes.
      sizes: number of devices along each axis, such as `data=2, tensor=4`. One of them may be -1,
        for all remaining devices. Axes that are not named have size 1.

    Returns:
      The mesh. It has all axes, so that the same program runs on every mesh.

    Raises:
      ValueError: an axis has another name, or the sizes do not fit the number of devices.
    """
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"the axes of a mesh are {', '.join(AXES)}; got {name!r}")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"{name} must be a positive int, or -1 for the rest, got {size!r}")
    count = len(jax.devices() if devices is None else devices)
    given = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no sizes"
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"one axis may be -1, got {given}")
    product = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and count and count % product == 0:
        sizes = {**sizes, open_axes[0]: count // product}
        product = count
    if product != count or -1 in sizes.values():
        raise ValueError(
            f"the product of the sizes must be the number of devices, {count}, got {given}; choose "
            "other sizes, -1 for one of them, or fewer devices"
        )
    shape = tuple(sizes.get(name, 1) for name in AXES)
    return jax.make_mesh(shape, AXES, (axis_type,) * len(AXES), devices=devices)
