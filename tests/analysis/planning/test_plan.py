import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from effattn import __main__
from effattn.analysis import best_mesh, liveness, plan, planning
from effattn.analysis.planning import counts, sequence, settings, traffic
from effattn.analysis.planning.plan import closer_seconds, least_seconds, planned
from effattn.nn import Experts, TransformerConfig

MODEL = TransformerConfig(
    vocab_size=256, num_layers=4, features=64, num_heads=8, num_kv_heads=4, positions="none"
)
# 16 bits, B T D of the batch of eight sequences of 128 tokens.
ROW = 8 * 128 * 64 * 2


def setting(mesh, config=MODEL, **options):
    defaults = {"batch": 8, "microbatches": 1, "precision": "mixed", "remat": False}
    options = {**defaults, **options}
    return settings.make(config, None, 128, mesh, **options)


def transfers(mesh, config=MODEL, **options):
    return {t.kind: t for t in traffic.transfers(setting(mesh, config, **options))}


def test_one_device_sends_nothing():
    assert transfers({}) == {}


def test_data_reduces_the_gradients_and_fsdp_gathers_and_scatters():
    whole = traffic.memory.parameters(setting({})).total * 2
    data = transfers({"data": 8})["data: gradients"]
    assert (data.operation, data.size) == ("all-reduce", whole)
    assert data.sent == pytest.approx(2 * 7 / 8 * whole)
    fsdp = transfers({"fsdp": 8}, remat=True)
    gathered = [t for t in fsdp.values() if t.operation == "all-gather"]
    ends = traffic.memory.parameters(setting({})).ends * 2
    # The layers once more for the backward pass.
    assert sum(t.number * t.size for t in gathered) == 2 * whole - ends
    assert fsdp["fsdp: gradients"].sent == pytest.approx(7 / 8 * whole)
    both = transfers({"data": 2, "fsdp": 4})
    assert both["data: gradients"].size == whole / 4


def test_tensor_takes_two_all_reduces_a_layer_in_each_direction():
    plain = transfers({"tensor": 4})["tensor: activations"]
    assert (plain.number, plain.size) == (4 * MODEL.num_layers + 2, ROW)
    again = transfers({"tensor": 4}, remat=True)["tensor: activations"]
    assert again.number == plain.number + MODEL.num_layers


def test_stages_pass_activations_and_their_gradients():
    stage = transfers({"stage": 2}, microbatches=4)["stage: activations"]
    assert stage.number * stage.size == 2 * ROW


def test_the_axis_expert_gathers_experts_and_scatters_their_gradients():
    config = dataclasses.replace(MODEL, experts=(Experts(8), None) * 2)
    found = transfers({"data": 2, "expert": 4}, config, remat=True)
    kernels = 8 * 3 * 64 * settings.counts.hidden_features(config) * 2
    gathered = found["expert: experts"]
    assert (gathered.operation, gathered.number, gathered.size) == ("all-gather", 2 * 2, kernels)
    assert found["expert: gradients of experts"].size == 2 * kernels
    assert found["data: gradients of experts"].size == 2 * kernels / 4
    whole = traffic.memory.parameters(setting({}, config))
    assert found["data, expert: gradients"].size == 2 * (whole.total - whole.experts)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"expert": 8}, "expert must divide the number of experts, 4, got 8"),
        ({"sequence": 2}, "sequence must be 1 with experts, because each device would compute"),
        ({"tensor": 2}, "tensor must be 1 for experts without a capacity"),
    ],
)
def test_meshes_on_which_experts_are_not_divided_are_refused(mesh, words):
    config = dataclasses.replace(MODEL, experts=Experts(4))
    with pytest.raises(ValueError, match=words):
        plan(config, None, 128, mesh, "h100", batch=8)


def test_operations_of_experts_are_those_of_the_chosen_ones():
    def operations(**options):
        config = dataclasses.replace(MODEL, **options)
        return plan(config, None, 128, {}, "h100", batch=8).operations[
            "feed-forward layers, forward"
        ]

    chosen = operations(experts=Experts(8, 2)) / operations()
    assert chosen == pytest.approx(2, rel=0.1)  # and the router
    one = operations(experts=Experts(8, 2, capacity_factor=0.5)) / operations()
    assert one == pytest.approx(1, rel=0.1)
    decoded = plan(
        dataclasses.replace(MODEL, experts=Experts(8, 2)), None, 128, {}, "h100", training=False
    )
    dense = plan(MODEL, None, 128, {}, "h100", training=False)
    of_layer = 3 * 64 * settings.counts.hidden_features(MODEL)
    more = decoded.operations["weights"] - dense.operations["weights"]
    assert more == 2 * MODEL.num_layers * (of_layer + 8 * 64)


@pytest.mark.parametrize("mixer", ["softmax", {"name": "sliding_window", "local_window_size": 9}])
def test_heads_are_exchanged_as_four_activations(mixer):
    config = dataclasses.replace(MODEL, num_kv_heads=8, mixer=mixer)
    sent = transfers({"sequence": 4}, config)["sequence: exchange_heads"]
    # Forward and backward: query, key, value and output.
    assert sent.operation == "all-to-all"
    assert sent.sent == pytest.approx(2 * 4 * ROW / 4 * 3 / 4 * MODEL.num_layers)
    # Recomputation exchanges those of the forward pass once more.
    again = transfers({"sequence": 4}, config, remat=True)["sequence: exchange_heads"]
    assert again.sent == pytest.approx(1.5 * sent.sent)


def test_few_key_heads_are_repeated_for_all_devices():
    each = [transfers({"sequence": n})["sequence: exchange_heads"] for n in (4, 8)]
    # Query and output of 8 heads; key and value of 4 and of 8 heads.
    of_heads = [t.sent / (n - 1) * n * n for t, n in zip(each, (4, 8), strict=True)]
    assert of_heads[1] / of_heads[0] == pytest.approx((8 + 8 + 8 + 8) / (8 + 8 + 4 + 4))


@pytest.mark.parametrize("mixer", ["linear", "delta_net"])
def test_states_that_pass_do_not_depend_on_the_length(mixer):
    config = dataclasses.replace(MODEL, mixer=mixer, num_kv_heads=None, dtype="bfloat16")
    short, long = (sequence.exchange(config, 0, 4, n, 1) for n in (256, 512))
    assert short[:3] == long[:3] and short.form == "pass_states"
    # The recurrence runs twice.
    alone = counts.operations_of_mixer(config, 0, 512)
    assert sum(long.operations) > 1.1 * sum(alone) / 4


def test_layers_divide_a_sequence_each_by_its_form():
    mixed = dataclasses.replace(MODEL, num_layers=2, mixer=["softmax", "linear"])
    pure = [dataclasses.replace(mixed, mixer=mixer) for mixer in ("softmax", "linear")]
    found = [plan(c, None, 128, {"sequence": 4}, "h100", batch=8) for c in (mixed, *pure)]
    waste = [p.operations.get("divided sequence", 0) for p in found]
    assert waste[1] == 0 and waste[0] == pytest.approx(waste[2] / 2)
    forms = {t.kind for t in found[0].transfers} - {"sequence: gradients"}
    assert forms == {"sequence: exchange_heads", "sequence: pass_states"}


MIXTURE = {
    "name": "mixture_of_mechanisms",
    "mechanisms": [{"name": "lstm"}, {"name": "softmax"}],
    "gate": "top1",
    "capacity": 0.25,
}


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (MIXTURE, "exchange_heads takes .*, got LSTM"),
        ("softmax", "the 16 devices of the mesh axis 'sequence' must divide the 8 heads of query"),
    ],
)
def test_mixers_whose_tokens_each_device_would_gather_are_refused(mixer, words):
    config = dataclasses.replace(MODEL, mixer=mixer, num_kv_heads=None)
    with pytest.raises(ValueError, match=f"sequence must be 1 for the mixer .*{words}"):
        plan(config, None, 128, {"sequence": 16}, "h100", batch=8)


def test_a_mixer_without_heads_has_no_tensor_parallelism():
    config = dataclasses.replace(MODEL, mixer="mamba", num_kv_heads=None)
    with pytest.raises(ValueError, match="tensor must be 1, because the mixer of 'mamba'"):
        plan(config, None, 128, {"tensor": 2}, "h100", batch=8)


def test_layers_after_the_first_have_the_parameters_of_value_residuals():
    config = dataclasses.replace(MODEL, mixer="rwkv7", num_kv_heads=None, feed_forward="rwkv7")
    more = dataclasses.replace(config, value_residual=True)
    count, features = settings.counts.parameters_of_layers, MODEL.features
    added = (MODEL.num_layers - 1) * (features + 2 * 32 * features)
    assert count(more) == count(config) + added
    assert settings.counts.hidden_features(config) == 4 * features
    with pytest.raises(ValueError, match="sequence must be 1 .*: no form passes on the values"):
        plan(more, None, 128, {"sequence": 2}, "h100", batch=8)


def test_the_model_fits_each_mechanism():
    """Key heads are left out for a mechanism without, and the context is the largest length."""

    def parameters(mechanism, **options):
        config = dataclasses.replace(MODEL, **options)
        return plan(config, mechanism, 128, {}, "h100").memory.parameters

    assert parameters("lstm") == parameters("lstm", num_kv_heads=None)
    assert parameters("hyena") == parameters("hyena", max_length=128)
    assert parameters("softmax") < parameters("softmax", num_kv_heads=None)


def test_a_mesh_that_does_not_divide_is_refused_with_a_sentence_for_each_number():
    mesh = {"data": 3, "sequence": 3, "stage": 3, "tensor": 3}
    with pytest.raises(ValueError) as error:
        plan(MODEL, None, 128, mesh, "h100", batch=8)
    for words in (
        "data * fsdp * expert * microbatches must divide the batch, 8, got 3",
        "sequence must divide the context, 128, got 3",
        "stage must divide the number of layers, 4, got 3",
        "tensor must divide the number of heads, 8, got 3",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hardware": "abacus"}, "hardware must be a Hardware or one of a100"),
        ({"mesh": {"rows": 2}}, "the axes of a mesh are stage"),
        ({"mesh": {"expert": 2}}, "expert must be 1 for a model without experts, got 2"),
        ({"mesh": {"data": 0}}, r"mesh\['data'\] must be an int, 1 or more"),
        ({"precision": "int8"}, "precision must be one of float32, mixed"),
        ({"model": "7B"}, "model must be a TransformerConfig"),
        ({"context": 0}, "context must be an int"),
        ({"training": False, "microbatches": 2, "batch": 2}, "microbatches must be 1 for decod"),
    ],
)
def test_wrong_arguments(changed, words):
    given = {"model": MODEL, "mechanism": None, "context": 128, "mesh": {}, "hardware": "h100"}
    with pytest.raises(ValueError, match=words):
        plan(**{**given, **changed})


def test_the_bubble_and_the_roofline():
    slow = planning.Hardware(
        name="slow", memory=1e9, operations=1e6, bandwidth=1e30, inside=1e30, between=1e30, island=8
    )
    found = plan(MODEL, None, 128, {"stage": 2}, slow, batch=8, microbatches=4)
    assert found.bubble == 1 / 5
    assert found.seconds == pytest.approx(sum(found.operations.values()) / 1e6 * 5 / 4)
    useful = sum(n for name, n in found.operations.items() if name != "recomputed")
    assert found.utilisation == pytest.approx(useful / (found.seconds * 1e6))
    # About six operations for each weight and token.
    weights = traffic.memory.parameters(setting({"stage": 2})).total
    assert useful == pytest.approx(6 * weights * 8 * 128, rel=0.4)


def test_decoding_reads_weights_and_states_once():
    slow = planning.Hardware(
        name="slow", memory=1e9, operations=1e30, bandwidth=1e6, inside=1e30, between=1e30, island=8
    )
    found = plan(MODEL, "softmax", 128, {}, slow, batch=8, training=False)
    assert found.seconds == pytest.approx((found.memory.parameters + found.memory.state) / 1e6)
    assert found.tokens_per_second == pytest.approx(8 / found.seconds)
    parts = plan(MODEL, "softmax", 128, {"fsdp": 2}, slow, batch=8, training=False)
    assert parts.memory.parameters == found.memory.parameters / 2
    assert [t.kind for t in parts.transfers] == ["fsdp: layers", "fsdp: embeddings"]


def test_decoding_sends_activations_to_the_next_stage_and_gathers_experts():
    config = dataclasses.replace(MODEL, experts=Experts(4))
    found = plan(
        config, None, 128, {"stage": 2, "expert": 2}, "h100", batch=8, training=False
    ).transfers
    sent = {t.kind: (t.operation, t.number) for t in found}
    assert sent == {"expert: experts": ("all-gather", 2), "stage: activations": ("send", 1)}


def test_saved_activations_pass_the_memory_once_for_each_microbatch():
    slow = planning.Hardware(
        name="slow", memory=1e9, operations=1e30, bandwidth=1e6, inside=1e30, between=1e30, island=8
    )

    def saved(stages):
        found = plan(MODEL, None, 128, {"stage": stages}, slow, batch=8, microbatches=8)
        used = found.memory
        weights = 3 * 8 * used.parameters + 2 * (used.masters + used.optimiser + used.parameters)
        return found.computing * 1e6 - weights, used.saved

    (one, held), (half, same) = saved(1), saved(2)
    # Half of the layers, twice as many microbatches in memory.
    assert same == pytest.approx(held, rel=0.01)
    assert one == pytest.approx(2 * 8 * held, rel=0.01)
    assert half == pytest.approx(one / 2, rel=0.01)


def rate(operation, axis, mesh):
    """Bytes a second of a transfer of a device with 8 devices in an island."""
    given = traffic.Transfer("", operation, (axis,), 1, 1e9, 1e9, False)
    found = setting(mesh, batch=1024)
    return 1e9 / traffic.seconds(given, found, planning.HARDWARE["h100"])


def test_links_inside_and_between_islands():
    h100 = planning.HARDWARE["h100"]
    mesh = {"data": 4, "fsdp": 2, "tensor": 8}
    assert rate("all-reduce", "tensor", mesh) == h100.inside
    assert rate("all-gather", "fsdp", mesh) == h100.between
    # Eight members of a host use eight adapters together.
    assert rate("all-gather", "fsdp", {"fsdp": 32}) == min(h100.inside, 8 * h100.between)


def test_neighbours_wait_for_the_slowest_link():
    h100 = planning.HARDWARE["h100"]
    assert rate("send", "sequence", {"sequence": 8}) == h100.inside
    assert rate("send", "sequence", {"sequence": 16}) == h100.between
    assert rate("send", "stage", {"stage": 2, "tensor": 8}) == h100.between


def test_exchanges_between_islands_use_the_link_of_each_device():
    h100 = planning.HARDWARE["h100"]
    # 8 of the 15 other devices are in the other island.
    assert rate("all-to-all", "sequence", {"sequence": 16}) == pytest.approx(h100.between * 15 / 8)
    assert rate("all-to-all", "sequence", {"sequence": 2, "tensor": 8}) == h100.between


def quadratic(query, key, value):
    weights = jax.nn.softmax(jnp.einsum("...qnh,...knh->...nqk", query, key))
    return jnp.einsum("...nqk,...knh->...qnh", weights, value)


class Linear(nnx.Module):
    def __init__(self, in_features, *, rngs):
        self.project = nnx.Linear(in_features, in_features, rngs=rngs)

    def __call__(self, x, **padding):
        return self.project(x)


@pytest.mark.parametrize(("mixer", "power"), [(quadratic, 2), (Linear, 1)])
def test_operations_of_functions_grow_as_they_do(mixer, power, monkeypatch):
    config = dataclasses.replace(
        MODEL, mixer=mixer, num_kv_heads=None, is_causal=mixer is Linear, dtype="float32"
    )
    exact = counts.operations_of_mixer(config, 0, 2048)
    monkeypatch.setattr(counts.cost, "COUNTED", 512)
    found = counts.operations_of_mixer(config, 0, 2048)
    assert found == pytest.approx(exact, rel=1e-6)
    assert found.forward / counts.operations_of_mixer(config, 0, 512).forward > 3 * power


def test_the_best_mesh_fits_and_is_the_fastest():
    tiny = planning.Hardware(
        name="tiny", memory=3e6, operations=1e12, bandwidth=1e12, inside=1e10, between=1e9, island=4
    )
    found = best_mesh(MODEL, None, 128, 8, tiny, batch=8, axes=("data", "fsdp", "tensor"), count=3)
    assert found.best.seconds == min(p.seconds for p in found.plans)
    assert all(p.fits and p.setting.devices == 8 for p in found.plans)
    assert "tensor must be at most 4, the devices of an island" in found.refused
    assert "meshes left out" in str(found)
    every = best_mesh(MODEL, None, 128, 8, tiny, batch=8, count=1)
    assert every.best.setting.mesh["expert"] == 1
    assert not any(reason.startswith("expert") for reason in every.refused)
    for axes, words in ((("rows",), "the axes of a mesh are"), (("data",) * 2, "different axes")):
        with pytest.raises(ValueError, match=words):
            best_mesh(MODEL, None, 128, 8, tiny, axes=axes)
    small = dataclasses.replace(tiny, memory=1e3)
    with pytest.raises(ValueError, match="the memory of a device is too small"):
        best_mesh(MODEL, None, 128, 8, small, batch=8, axes=("data", "fsdp"))


TINY = planning.Hardware(
    name="tiny", memory=5e6, operations=1e12, bandwidth=1e11, inside=1e10, between=1e9, island=4
)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        pytest.param(MODEL, ("fsdp", "sequence", "tensor"), id="sequence", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(MODEL, experts=Experts(4)),
            ("stage", "data", "fsdp", "expert"),
            id="experts",
        ),
    ],
)
def test_the_search_finds_what_all_plans_give(config, axes):
    found = best_mesh(config, None, 128, 8, TINY, batch=8, axes=axes, count=4)
    fitting = []
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(axes)):
        mesh = dict(zip(axes, sizes, strict=True))
        if math.prod(sizes) != 8 or mesh.get("tensor", 1) > TINY.island:
            continue
        rows = math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
        parts = 8 // rows if mesh.get("stage", 1) > 1 else 1
        with contextlib.suppress(ValueError):
            each = plan(config, None, 128, mesh, TINY, batch=8, microbatches=parts)
            fitting += [each] if each.fits else []
    assert len(fitting) > 4
    seconds = sorted(each.seconds for each in fitting)[:4]
    assert [each.seconds for each in found.plans] == seconds


@pytest.mark.parametrize(
    ("mixer", "mesh"),
    [("softmax", {"stage": 2, "tensor": 4}), ("linear", {"sequence": 2, "tensor": 2})],
)
def test_bounds_of_the_search_hold(mixer, mesh):
    given = setting(mesh, dataclasses.replace(MODEL, mixer=mixer), remat=True)
    found = planned(given, TINY, True, liveness.ACCELERATOR)
    assert least_seconds(given, TINY) < closer_seconds(given, TINY) <= found.seconds
    assert traffic.memory.least(given) < found.memory.total


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(planning, "MODELS", {"tiny": MODEL})
    arguments = ["plan", "--model", "tiny", "--context", "128", "--batch", "8"]
    assert __main__.main([*arguments, "--mesh", "fsdp=2,tensor=2"]) == 0
    out = capsys.readouterr().out
    assert "4 h100 (fsdp=2, tensor=2), mixed" in out and "fits in 80 GB" in out
    assert max(map(len, out.splitlines())) <= 80
    two = ["--mesh", "fsdp=2", "--devices", "2"]
    for wrong in (["--mesh", "fsdp"], ["--mesh", "fsdp=2,fsdp=4"], two, []):
        assert __main__.main([*arguments, *wrong]) == 2
    assert __main__.main(["plan", "--model", "1T", "--context", "1"]) == 2
