"""What all tests share: eight virtual devices, quick compilation, hypothesis that draws alike."""

import os
from importlib import metadata

import jax
from hypothesis import HealthCheck, Phase, settings

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
