"""Choice of the implementation that runs a call: devices, tuning cache and support table."""

from effattn.dispatch.choice import (
    FROM_AMPERE,
    ONLY_BY_NAME,
    PLATFORMS,
    TILED,
    XLA,
    Call,
    Chosen,
    Limits,
    asks_for_kernels,
    choose,
    on_platform,
    open_length,
    requested,
    suited,
    take_xla,
    untuned,
)
from effattn.dispatch.contexts import interpreted, is_interpreted, recorded, recorder
from effattn.dispatch.implementations import Implementations

__all__ = [
    "FROM_AMPERE",
    "ONLY_BY_NAME",
    "PLATFORMS",
    "TILED",
    "XLA",
    "Call",
    "Chosen",
    "Implementations",
    "Limits",
    "asks_for_kernels",
    "choose",
    "interpreted",
    "is_interpreted",
    "on_platform",
    "open_length",
    "recorded",
    "recorder",
    "requested",
    "suited",
    "take_xla",
    "untuned",
]
