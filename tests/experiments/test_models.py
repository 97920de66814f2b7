"""Models of a comparison differ only in their mechanism, and have equally many parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Centroids, Experts, MixtureOfExperts, Transformer
from experiments import lm, mlm, seq2seq
from experiments.harness import models
from experiments.tasks import pairs
from tests.experiments.counting import Counting, Last
from tests.experiments.counting import Options as TaskOptions

OPTIONS = TaskOptions(task="counting", layers=2, width=64, heads=4, window=16)
SIDES = seq2seq.Config(layers=2, width=64, heads=4, window=2)
CAUSAL = Counting(numbers=256, lengths=(60,))
BIDIRECTIONAL = dataclasses.make_dataclass("Bidirectional", [], bases=(Counting,), frozen=True)
BIDIRECTIONAL.is_causal = False
PAIRS = pairs.Translation(pairs=pairs.load("reverse", 40, 8))


def model(mechanism, task=CAUSAL, options=OPTIONS, **changes):
    build = models.builder(mechanism, dataclasses.replace(options, **changes), task)
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def hidden_features(model):
    layers = [m for _, m in nnx.iter_modules(model) if hasattr(m, "up") and hasattr(m, "down")]
    return {layer.up.kernel.shape[1] for layer in layers}


@pytest.mark.parametrize(
    ("mechanism", "task", "change"),
    [
        ("linear", CAUSAL, 0),
        ("mamba", CAUSAL, -1),
        ("lstm/lsh", CAUSAL, -1),
        ("fnet", BIDIRECTIONAL(numbers=256, lengths=(60,)), 1),
        ("aft_simple", CAUSAL, -1),
        ("gmlp", Last(), -1),
    ],
)
def test_feed_forward_layers_make_up_for_the_mechanism(mechanism, task, change):
    softmax, other = (model(m, task) for m in ("softmax", mechanism))
    a_feature = 3 * OPTIONS.width * OPTIONS.layers
    assert abs(parameters(softmax) - parameters(other)) <= a_feature / 2
    (usual,), (chosen,) = hidden_features(softmax), hidden_features(other)
    assert (chosen > usual) - (chosen < usual) == change
    assert hidden_features(model(mechanism, task, equal_parameters=False)) == {usual}


@pytest.mark.parametrize(
    ("side", "mechanism"), [("encoder", "gmlp"), ("decoder", "mamba"), ("encoder", "softmax")]
)
def test_feed_forward_layers_of_translators_make_up_for_one_side(side, mechanism):
    softmax, other = (model(m, PAIRS, SIDES, side=side) for m in ("softmax", mechanism))
    a_feature = 3 * SIDES.width * 2 * SIDES.layers
    assert abs(parameters(softmax) - parameters(other)) <= a_feature / 2


@pytest.mark.parametrize("is_causal", [True, False])
def test_longformer_has_global_tokens_and_is_no_sliding_window(is_causal):
    task = CAUSAL if is_causal else BIDIRECTIONAL(numbers=256, lengths=(60,))
    options = dataclasses.replace(OPTIONS, layers=1, width=8, heads=2, window=4)

    @jax.jit
    def run(tokens, changed):
        window, longformer = (
            models.builder(name, options, task)(nnx.Rngs(0))
            for name in ("sliding_window", "longformer")
        )
        return window(tokens), longformer(tokens), longformer(changed)

    tokens = np.random.default_rng(0).integers(256, size=(1, 60))
    changed = tokens.copy()
    changed[:, 30:] = tokens[:, ::-1][:, 30:]
    window, longformer, changed = map(np.asarray, run(tokens, changed))
    apart = np.abs(window - longformer).max(-1)[0]
    assert (apart[8:] > 1e-3).all()
    later = np.abs(longformer - changed).max(-1)[0]
    assert (later[30:] > 1e-3).all()
    # The first 8 tokens are global: they read later tokens, unless the model is causal.
    np.testing.assert_array_equal(later[:8] > 1e-6, not is_causal)
    assert later[8:28].max() < 1e-6


def test_a_mechanism_that_cannot_tell_the_order_gets_learned_positions():
    assert model("aft_simple").positions is not None
    assert model("aft_simple/lsh").positions is None


def test_a_mechanism_larger_than_the_whole_model_is_refused():
    with pytest.raises(ValueError, match=r"lstm.* has 170,564 parameters.*117,056 .*softmax"):
        model("lstm/mixture_of_mechanisms,mechanisms=('lstm','gru','mamba','hyena')")


CHANGES = [
    ("key_heads", "num_kv_heads", None, 1),
    ("positions", "positions", None, "learned"),
    ("norm", "norm", "rms", "layer"),
    ("feed_forward", "feed_forward", "swiglu", "gelu"),
    ("precision", "dtype", "float32", "float16"),
    ("remat", "remat", False, True),
]


@pytest.mark.parametrize(("option", "field", "usual", "changed"), CHANGES)
def test_options_of_the_model_reach_all_kinds(option, field, usual, changed):
    for task, options in ((CAUSAL, OPTIONS), (Last(), OPTIONS), (PAIRS, SIDES)):

        def configs(task=task, options=options, **changes):
            config = models._KINDS[task.model]
            (build,) = [config("softmax", dataclasses.replace(options, **changes), task, None)]
            built = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
            found = getattr(built, "config", None) or built.transformer.config
            return (found.encoder, found.decoder) if hasattr(found, "encoder") else (found,)

        assert {getattr(config, field) for config in configs()} == {usual}
        assert {getattr(config, field) for config in configs(**{option: changed})} == {changed}


def test_experts_reach_all_kinds_and_keep_the_models_equally_large():
    options = {
        "experts": 4,
        "experts_per_token": 1,
        "expert_capacity": 1.5,
        "shared_experts": 1,
    }
    for task, usual in ((CAUSAL, OPTIONS), (Last(), OPTIONS), (PAIRS, SIDES)):
        given = dataclasses.replace(usual, **options)
        softmax, other = (model(m, task, given) for m in ("softmax", "mixture_of_mechanisms"))
        layers = [m for _, m in nnx.iter_modules(softmax) if isinstance(m, MixtureOfExperts)]
        count = OPTIONS.layers * (2 if task is PAIRS else 1)
        assert [layer.experts for layer in layers] == [Experts(4, 1, 1.5, 1)] * count
        # A hidden feature of each expert, and of the shared one.
        a_feature = 3 * OPTIONS.width * count * 5
        assert abs(parameters(softmax) - parameters(other)) <= a_feature / 2


@pytest.mark.parametrize("script", [lm, mlm, seq2seq], ids=["lm", "mlm", "seq2seq"])
def test_options_of_the_model_are_equal_for_every_experiment(script):
    usual = script.Config()
    for option, _, default, _ in CHANGES:
        assert getattr(usual, option) == default
    assert (usual.redraw, usual.equal_parameters, usual.window) == (0, True, None)
    assert {field.name for field in dataclasses.fields(OPTIONS)} - {"preset", "task"} <= {
        field.name for field in dataclasses.fields(usual)
    }


def test_a_classifier_reads_the_mean_of_its_tokens():
    options = dataclasses.replace(OPTIONS, layers=1, width=8, heads=2)
    task = Last()
    classifier = models.builder("softmax", options, task)(nnx.Rngs(0))
    (tokens, lengths), _ = task.training(3, 0, 0)
    logits = nnx.jit(classifier)(tokens, lengths)
    assert logits.shape == (3, task.num_classes)

    @nnx.jit
    def of_mean(row):
        return classifier.head(classifier.transformer(row)[0].mean(0))

    shortest = lengths.argmin()
    expected = of_mean(tokens[shortest, None, : lengths[shortest]])
    np.testing.assert_allclose(logits[shortest], expected, rtol=1e-5, atol=1e-6)
    # Other tokens in the padding change no class.
    other = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    assert (other != tokens).any()
    np.testing.assert_array_equal(nnx.jit(classifier)(other, lengths), logits)


@pytest.mark.parametrize("side", ["encoder", "decoder", "cross_attention"])
def test_the_compared_side_of_a_translator_has_the_mechanism(side):
    options = {"encoder": "sliding_window", "decoder": "retention", "cross_attention": "additive"}
    built = model("linear", PAIRS, SIDES, side=side, **options)
    names = {
        "encoder": built.config.encoder.mixer[0]["name"],
        "decoder": built.config.decoder.mixer[0]["name"],
        "cross_attention": built.config.cross_attention["name"],
    }
    assert names == {**options, side: "linear"}
    assert (built.config.encoder.is_causal, built.config.decoder.is_causal) == (False, True)
    if side != "encoder":
        assert built.config.encoder.mixer[0]["local_window_size"] == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("task", [Last(), PAIRS], ids=["classifier", "translator"])
def test_padding_moves_no_centroids(task):
    options = OPTIONS if task.model == "classifier" else SIDES
    options = dataclasses.replace(options, layers=1, width=8, heads=2)
    text = "routing,num_clusters=2,cluster_size=4"
    batch = task.training(4, 0, 0)
    tokens, *_ = batch.inputs
    lengths = batch.inputs[1 if task.model == "classifier" else 2]

    @jax.jit
    def moved(tokens):
        model = models.builder(text, options, task)(nnx.Rngs(0))
        model.update_centroids(tokens, *batch.inputs[1:])
        encoder = model.transformer if isinstance(model, models.Classifier) else model.encoder
        assert isinstance(encoder, Transformer)
        return nnx.to_pure_dict(nnx.state(encoder, Centroids))

    other = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, 7)
    assert (other != tokens).any()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), moved(tokens), moved(other)
    )


def test_a_call_that_fails_is_found_without_training():
    build = models.builder("linformer,max_length=3,num_projected=2", OPTIONS, Last())
    with pytest.raises(ValueError, match="is for at most 3 tokens, got 12"):
        models.check_call("linformer", build, Last())
