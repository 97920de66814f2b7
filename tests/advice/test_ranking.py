"""The adviser's order, its costs and errors, and its refusals."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn import registry
from effattn.advice import facts, quality
from effattn.advice.layers import Layer
from effattn.analysis import cost
from effattn.nn import TransformerConfig, TransformerLM

NAMES = ("softmax", "sliding_window", "linear", "s4d", "sparse_transformer")
small = functools.partial(effattn.advise, heads=2, head_dim=16, mechanisms=NAMES)


@pytest.fixture(scope="module")
def long():
    return small(4096, causal=True, decode=True)


def test_exact_attention_is_best_for_short_sequences():
    advice = small(64, causal=True)
    assert advice.best.name == "softmax"
    assert not any(option.pays for option in advice.options if option.layer.entry.takes_heads)
    assert advice.best.gives_up == ("none, as it is exact softmax attention",)


def test_long_decoding_takes_a_state_of_constant_size(long):
    first, second, third, *others = long.options
    assert {first.name, second.name} == {"sliding_window", "linear"} and third.name == "softmax"
    assert first.constant_state and second.constant_state and not third.constant_state
    assert first.pays and first.state_bytes < third.state_bytes / 2
    # The keys of all tokens remain in the state, however few a step reads.
    assert [o.name for o in others] == ["sparse_transformer", "s4d"]
    assert others[0].share < 0.5 and not others[0].pays


def test_the_report_fits_80_columns_and_says_why(long):
    text = str(long)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "rank",
        "mechanism",
        "no quality yet: results in fewer than three tasks",
        "\n  Costs and quality:\n  - ",
        "\n  Drawbacks:\n  - ",
        long.code[:20],
    ):
        assert part in text
    assert str(small(4096, causal=True, decode=True)) == text


def test_exact_leaves_out_all_others():
    advice = small(64, causal=True, exact=True)
    assert [option.name for option in advice.options] == ["softmax"]
    assert advice.left_out["linear"] == "is not exact"
    assert small(64, causal=True, exact=False).left_out == {"softmax": "is exact"}


def test_needs_leave_out_mechanisms_and_say_why():
    advice = effattn.advise(
        32, causal=False, needs=("segments",), heads=1, head_dim=8,
        mechanisms=("softmax", "fnet"),
    )  # fmt: skip
    assert "a Fourier transform mixes all tokens" in advice.left_out["fnet"]


def test_larger_windows_have_smaller_errors():
    windows = [
        {"name": "sliding_window", "local_window_size": (size, 0)} for size in (3, 15, 31, 63)
    ]
    sample = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 8))
    advice = effattn.advise(causal=True, sample=tuple(sample), mechanisms=[*windows, "linear"])
    by_window = {o.layer.given.get("local_window_size"): o for o in advice.options}
    errors = [by_window[size, 0].error for size in (3, 15, 31, 63)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6
    placed = [option.error for option in advice.options if option.error is not None]
    assert placed == sorted(placed)
    assert by_window[None].error is None
    assert "not an approximation" in by_window[None].error_note


@pytest.mark.parametrize("name", ["bigbird", "longformer", "performer", "hierarchical"])
def test_approximations_have_an_error_on_a_sample(name):
    sample = tuple(jax.random.normal(jax.random.key(0), (3, 1, 64, 1, 8)))
    (option,) = effattn.advise(causal=True, sample=sample, mechanisms=name).options
    assert 0 <= option.error < 2 and option.error_note == ""


def test_errors_are_those_of_the_options_for_the_length():
    # The stride of 1024 tokens is 32, so that the last 32 of 64 tokens are near each token.
    sample = tuple(jax.random.normal(jax.random.key(0), (3, 1, 64, 1, 8)))
    strided = {"name": "sparse_transformer", "stride": 32}
    find = functools.partial(effattn.advise, causal=True, sample=sample)
    (same,) = find(mechanisms="sparse_transformer").options
    advice = find(1024, mechanisms=["sparse_transformer", strided])
    far, given = advice.options
    assert far.error == given.error < same.error
    assert "1,024 tokens, 1 heads of 8 features; errors are measured on a sample of 64 tokens" in (
        " ".join(str(advice).split())
    )


@pytest.mark.parametrize(
    "sample", [np.full((1, 16, 1, 8), np.nan), np.ones((0, 16, 1, 8))], ids=["nan", "empty"]
)
def test_a_sample_without_numbers_gives_no_error(sample):
    advice = effattn.advise(causal=True, sample=(sample,) * 3, mechanisms="sliding_window")
    assert advice.best.error is None and "values that are not finite" in advice.best.error_note


def test_a_model_is_a_sample():
    config = TransformerConfig(
        vocab_size=11, num_layers=2, features=16, num_heads=2, mixer="softmax", remat=True
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(48)[None] % 11
    window = {"name": "sliding_window", "local_window_size": (3, 0)}
    advice = effattn.advise(causal=True, sample=(model, tokens), mechanisms=[window, "linformer"])
    found = advice.options[0]
    assert 0 < found.error < 1 and (found.layer.heads, found.layer.head_dim) == (2, 8)
    assert found.length == 48


def test_measured_seconds_replace_operations():
    advice = effattn.advise(
        64, causal=False, measure=True, heads=1, head_dim=8, mechanisms=("softmax", "nystrom")
    )
    by_name = {option.name: option for option in advice.options}
    of_exact, of_nystrom = by_name["softmax"], by_name["nystrom"]
    assert of_exact.share == 1 and of_nystrom.share == of_nystrom.seconds / of_exact.seconds
    assert "time" in str(advice)


@pytest.mark.slow
def test_measured_quality_comes_before_cost(tmp_path, monkeypatch):
    path = tmp_path / "quality.json"
    results = [
        {
            "mechanism": name,
            "task": "recall",
            "is_causal": True,
            "score": score,
            "typical": typical,
            "source": "here",
        }
        for name, score, typical in (
            ("s4d", 0.9, 0.6),
            ("s4d", 0.3, 0.1),
            ("linear", 0.4, 0.6),
            ("sliding_window", 0.7, 0.6),
        )
    ]
    path.write_text(json.dumps({"schema": 2, "results": results}))
    monkeypatch.setattr(quality, "PATH", path)
    advice = small(4096, causal=True)
    assert [o.name for o in advice.options[:3]] == ["s4d", "sliding_window", "linear"]
    reason = "recall: score 0.90, where a typical mechanism has 0.60 (here)"
    assert reason in advice.best.reasons
    assert advice.best.score == pytest.approx(0.25) and "+0.25 (2)" in str(advice)
    assert "quality" in str(advice).splitlines()[2]
    assert "are from:\n  here\n" in str(advice)


@pytest.mark.parametrize(
    "content",
    ["not JSON", "[]", '{"schema": 1, "results": []}', '{"schema": 2, "results": [{}]}',
     '{"schema": 2, "results": [{"mechanism": "linear", "task": "a", "is_causal": true, '
     '"score": "much", "typical": 0.5, "source": "b"}]}'],
)  # fmt: skip
def test_another_schema_of_quality_is_refused(content, tmp_path):
    path = tmp_path / "quality.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="quality.json"):
        quality.read(path)


@pytest.mark.parametrize("name", ["softmax", "sliding_window", "sparse_transformer"])
def test_counts_of_long_sequences_are_extrapolated(name, monkeypatch):
    layer = Layer(registry.get(name), {}, 1, 16, True)
    estimate = layer.operations(65536)
    monkeypatch.setattr(cost, "COUNTED", 65536)
    assert layer.operations(65536) == pytest.approx(estimate, rel=0.02)


def test_default_options_that_do_not_suit_the_length_leave_a_mechanism_out():
    advice = effattn.advise(
        5, causal=False, heads=1, head_dim=8, mechanisms=("softmax", "nystrom", "linformer")
    )
    assert advice.left_out["nystrom"].startswith("5 tokens do not suit its default options: num_l")
    assert "linformer" in advice.left_out


def test_the_code_runs(long):
    names = {}
    exec(long.code, names)
    assert names["y"].shape == (1, 1, 32) and int(names["state"].length[0]) == 1


# Layers of every kind: any function, a mixer with heads, without heads, and with a kind.
@pytest.mark.parametrize(
    "name", ["block_sparse", "longformer", "mamba", "fnet", "lstm", "synthesizer_random", "lsh"]
)
def test_the_code_of_every_kind_of_layer_runs(name):
    entry = registry.get(name)
    layer = Layer(entry, {}, 2, 8, "causal" in entry.capabilities)
    names = {}
    exec(layer.code(256, "decode" in entry.capabilities), names)
    assert names["y"].shape[-1] == 16
    assert type(names["layer"]) is type(layer.build(256))


def test_no_two_mechanisms_have_the_same_costs():
    counts = {name: Layer(registry.get(name), {}, 1, 16, True).operations(1024)
              for name in ("sliding_window", "dilated", "longformer", "block_sparse")}  # fmt: skip
    assert len(set(counts.values())) == len(counts), counts


BAD = [
    ({"length": 0}, "length must be .* 1 or more.*got 0"),
    ({"length": None}, "length must be an int, 1 or more, if there is no sample; got None"),
    ({"causal": 3}, "causal must be True or False"),
    ({"causal": False, "decode": True}, "decode=True needs causal=True, got causal=False"),
    ({"needs": "segments"}, "needs must be a sequence of names of capabilities, got 'segments'"),
    ({"needs": 3}, "needs must be a sequence of names of capabilities, got 3"),
    ({"needs": ["segment"]}, "unknown capability 'segment'; did you mean segments"),
    ({"mechanisms": ["sotfmax"]}, "unknown mechanism 'sotfmax'; did you mean softmax"),
    ({"mechanisms": [{"name": "linear", "windw": 3}]}, "'linear' has no option windw"),
    ({"mechanisms": []}, r"mechanisms must have a name or more, or be None .*, got \[\]"),
    ({"mechanisms": 3}, "mechanisms must be a registered name.* got 3"),
    ({"device": ["cpu"]}, r"device must be None or one of cpu, gpu, tpu, got \['cpu'\]"),
    ({"device": "gpus"}, "device must be None or one of cpu, gpu, tpu, got 'gpus'"),
    ({"device": "tpu", "measure": True}, "measure=True needs device='cpu', this device, got 'tpu'"),
    ({"heads": 0}, "heads must be"),
    ({"head_dim": 7}, "head_dim must be even, as layers rotate pairs of features, got 7"),
    ({"sample": np.ones((1, 8, 1, 8))}, "sample must be .query, key, value.*; got ndarray"),
    (
        {"sample": ([[1.0], [1.0, 2.0]], *np.ones((2, 1, 8, 1, 8)))},
        r"sample must be .*; got \(list, \(1, 8, 1, 8\), \(1, 8, 1, 8\)\)",
    ),
    ({"sample": (np.ones(3), 1, 2)}, r"sample must be .*; got \(\(3,\), int, int\)"),
    ({"sample": 3 * [np.ones((1, 8, 1, 8), int)]}, "query of sample must have floating-point"),
    ({"sample": 3 * [np.full((1, 1, 1), "a")]}, "floating-point numbers, got <U1"),
    (
        {"sample": [np.ones((1, 8, 1, n), "f") for n in (8, 4, 4)]},
        "query and key must have the same head size, got 8 .* and 4",
    ),
    ({"sample": (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), np.ones((1, 2)))}, "without such layers"),
    ({"mechanisms": ["linformer"]}, "no mechanism fits the case .*linformer: lacks 'causal'"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_arguments_are_refused(given, message):
    if jax.default_backend() != "cpu" and "tpu" in given.values():
        pytest.skip("the message names this device")
    arguments = {"length": 64, "causal": True, "heads": 1, "head_dim": 8, **given}
    with pytest.raises(ValueError, match=message):
        effattn.advise(**{"mechanisms": ["softmax"], **arguments})


@pytest.mark.parametrize("name", registry.names())
def test_facts_know_every_family(name):
    entry = registry.get(name)
    losses = facts.gives_up(entry)
    assert losses and not any("unknown" in loss for loss in losses)
    assert facts.kind(entry) in facts.KINDS and facts.idea(entry)


def test_mechanisms_that_compare_tokens():
    compares = {n for n in registry.names() if facts.compares_tokens(registry.get(n))}
    layers = {"gated_attention", "latent", "talking_heads", "indexed", "inducing_points", "luna"}
    assert layers | {"softmax", "linear", "lsh", "synthesizer_mixture"} <= compares
    assert not compares & {"fnet", "lstm", "convolution", "aft_simple", "synthesizer", "s4"}
