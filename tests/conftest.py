"""What all tests share: eight virtual devices, and hypothesis that draws the same everywhere."""

import jax
from hypothesis import HealthCheck, Phase, settings

pytest_plugins = ["tests.laws.seconds"]

# Before any test asks for a device. All but the tests of sharding run on the first.
jax.config.update("jax_num_cpu_devices", 8)

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
