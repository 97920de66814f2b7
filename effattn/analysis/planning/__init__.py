"""Plans on paper: memory, operations, traffic and time of a model on a mesh of devices.

    from effattn.analysis import planning
    model = planning.MODELS["7B"]
    print(planning.plan(model, "softmax", 8192, {"fsdp": 8}, "h100", batch=8))
    print(planning.best_mesh(model, "gated_linear", 2**20, 64, "h100", batch=8))

`plan` describes the model of memory and time.
"""

from effattn.analysis.planning.hardware import HARDWARE, Hardware
from effattn.analysis.planning.models import MODELS
from effattn.analysis.planning.plan import Plan, plan
from effattn.analysis.planning.search import Meshes, best_mesh

__all__ = ["HARDWARE", "MODELS", "Hardware", "Meshes", "Plan", "best_mesh", "plan"]
