"""Models of a comparison differ only in their mechanism, and have equally many parameters."""

import jax
import pytest
from flax import nnx

from experiments.harness import models

SIZES = {"layers": 2, "width": 64, "heads": 4, "window": 16, "precision": "float32", "context": 64}


def model(mechanism, equal_parameters, is_causal=True):
    build = models.language_model(
        mechanism, 256, **SIZES, equal_parameters=equal_parameters, is_causal=is_causal
    )
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def hidden_features(model):
    return {layer.feed_forward.gate.kernel.shape[1] for layer in model.blocks}


@pytest.mark.parametrize(
    ("mechanism", "is_causal", "change"),
    [
        ("linear", True, 0),
        ("mamba", True, -1),
        ("lstm/lsh", True, -1),
        ("fnet", False, 1),
        ("aft_simple", True, -1),
    ],
)
def test_feed_forward_layers_make_up_for_the_mechanism(mechanism, is_causal, change):
    softmax, other = (model(m, True, is_causal) for m in ("softmax", mechanism))
    a_feature = 3 * SIZES["width"] * SIZES["layers"]
    assert abs(parameters(softmax) - parameters(other)) <= a_feature / 2
    (usual,), (chosen,) = hidden_features(softmax), hidden_features(other)
    assert (chosen > usual) - (chosen < usual) == change
    assert hidden_features(model(mechanism, False, is_causal)) == {usual}


def test_a_mechanism_that_cannot_tell_the_order_gets_learned_positions():
    assert model("aft_simple", True).positions is not None
    assert model("aft_simple/lsh", True).positions is None


def test_a_mechanism_larger_than_the_whole_model_is_refused():
    with pytest.raises(ValueError, match=r"lstm.* has 170,564 parameters.*117,056 .*softmax"):
        model("lstm/mixture_of_mechanisms,mechanisms=('lstm','gru','mamba','hyena')", True)
