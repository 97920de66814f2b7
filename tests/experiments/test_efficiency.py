import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from effattn import registry
from experiments import efficiency
from experiments.costs import caches, curves, figures, layers, measuring, tables, theory
from experiments.costs.layers import Layer, Workload, directions_of
from experiments.harness.errors import UserError
from experiments.harness.report import SCHEMA
from tests.laws.battery import FIRST_NAMES
from tests.marks import slow

BUDGET = measuring.Budget(rounds=2, seconds=1.0, program_bytes=1e9)


def measure(layer, budget, shorter, exact):
    programs = next(measuring.compile_layers([layer]))
    return measuring.measure(layer, programs, budget, shorter, exact)


def test_a_run_measures_what_is_missing_and_writes_a_summary(tmp_path, monkeypatch, capsys):
    """Other tests compile the programs of the longest sequences and of decoding."""
    monkeypatch.setattr(efficiency, "PLAIN_LENGTHS", ())
    monkeypatch.setattr(measuring, "longest", lambda *args: 4096)
    monkeypatch.setattr(caches, "step_seconds", lambda *args: {1024: 0.01})
    argv = ["--output", str(tmp_path), "--rounds", "2", "--memory", "0.1", "--lengths"]
    few = ["128", "--directions", "causal", "--mechanisms"]
    assert efficiency.main([*argv, *few, "aft_simple"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema"] == SCHEMA
    command = summary["command"]
    assert command.startswith("python -m experiments.efficiency") and "aft_simple" in command
    assert "--output" not in command
    assert {r["mechanism"] for r in summary["layers"]} == {"softmax", "aft_simple"}
    exact, other = (r for r in summary["layers"] if r["length"] == 128)
    for which in layers.PASSES:
        assert exact["passes"][which]["ratio"] == 1
        assert other["passes"][which]["ratio"] > 0 and other["passes"][which]["operations"] > 0
    assert all(r["forward"] == r["step"] == 4096 for r in summary["longest"])
    assert [r["cache"] for r in summary["caches"]][:2] == [
        "softmax, multi-head",
        "softmax, grouped-query",
    ]
    names = ("time-forward", "time-step", "memory-step")
    assert all((tmp_path / f"{name}-causal.png").exists() for name in names)
    text = (tmp_path / "summary.md").read_text()
    assert "python -m experiments.efficiency" in text and text.count("| `aft_simple` |") == 3
    assert "Caches that grow have room for 2k tokens after every prefix." in text
    assert "jax" in summary["config"]["environment"]

    path = tmp_path / "layers" / "softmax-causal-128.json"
    times = path.stat().st_mtime_ns, (tmp_path / "summary.md").stat().st_mtime_ns
    (tmp_path / "layers" / "aft_simple-causal-128.json").unlink()
    capsys.readouterr()
    assert efficiency.main([*argv, *few, "aft_simple"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " tokens  causal " in line]
    assert lines == ["128 tokens  causal aft_simple"]
    assert path.stat().st_mtime_ns == times[0]
    assert (tmp_path / "summary.md").stat().st_mtime_ns > times[1]

    for folder in ("layers", "longest", "caches"):
        shutil.rmtree(tmp_path / folder)
    more = [*argv, *few, "aft_simple", "convolution"]
    for extras in (["--extras", "caches"], ["--extras"]):  # the others stay
        assert efficiency.main([*more, *extras]) == 0
        again = json.loads((tmp_path / "summary.json").read_text())
        assert exact in again["layers"] and len(again["layers"]) == 3
        assert [r["mechanism"] for r in again["longest"]] == [
            "softmax",
            "aft_simple",
            "convolution",
        ]
        assert {r["cache"] for r in again["caches"]} > {r["cache"] for r in summary["caches"]}
        assert again["command"].endswith("--extras longest caches")
    lines = [line for line in capsys.readouterr().out.splitlines() if " tokens  causal " in line]
    assert lines == ["128 tokens  causal convolution"]

    path.write_text("{")
    assert efficiency.main([*argv, *few, "aft_simple"]) == 1
    assert f"{path} is damaged; delete it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mechanisms", "sofmax"], "unknown mechanism 'sofmax'; registered are softmax, "),
        (["--mechanisms", "linear", "linear"], "--mechanisms must not repeat a value"),
        (["--mechanisms", "fnet", "--directions", "causal"], "fnet is bidirectional only"),
        (["--lengths", "300"], "--lengths must be powers of two from 128 to 67108864, got 300"),
        (["--lengths", "64"], "--lengths must be powers of two from 128 to 67108864, got 64"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--heads", "3"], "--heads 3 must divide --features 256"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--memory", "-1"], "--memory must be positive"),
        (["--import", "no_such_module"], "there is no module 'no_such_module'"),
    ],
)
def test_bad_input_is_one_sentence(argv, message, tmp_path, capsys):
    assert efficiency.main([*argv, "--output", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_folder_of_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    assert efficiency.main(["--quick", "--output", str(tmp_path)]) == 1
    assert "is not empty and holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", registry.names())
def test_every_mechanism_has_a_layer_in_each_direction(name):
    for direction in layers.directions_of(name):
        nnx.eval_shape(Layer(name, direction, 512).build)


def test_longformer_has_global_tokens():
    """Without global tokens the layer is a sliding window."""
    longformer, window = (
        layers.compile_pass(Layer(name, "causal", 512), "forward")
        for name in ("longformer", "sliding_window")
    )
    assert longformer.operations > window.operations


def constants_of(closed):
    """Sizes of the arrays that a program holds, in bytes."""
    yield from (x.nbytes for x in getattr(closed, "consts", ()))
    for eqn in closed.eqns:
        yield from (getattr(v.val, "nbytes", 0) for v in eqn.invars if hasattr(v, "val"))
        params = list(eqn.params.values())
        for inner in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from constants_of(inner)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        (slow if name not in FIRST_NAMES else pytest.param)(name, direction)
        for name in registry.names()
        for direction in directions_of(name)
    ],
)
def test_programs_hold_no_arrays_of_all_tokens(name, direction):
    """Compilers copy such arrays many times: for a million tokens the machine's memory was full."""
    layer = Layer(name, direction, 2048)
    graph, state = nnx.split(nnx.eval_shape(layer.build))
    x = jax.ShapeDtypeStruct((1, layer.length, layer.workload.features), jnp.float32)
    closed = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    assert sum(constants_of(closed)) < 16 * layer.length  # lists of blocks are smaller


def test_a_program_above_the_budget_is_compiled_and_not_run():
    budget = measuring.Budget(1, 1.0, program_bytes=1e5)
    record = measure(Layer("aft_simple", "causal", 128), budget, None, None)
    for found in record["passes"].values():
        assert found["skipped"] == "needs 0.0 GB" and found["needed_bytes"] > 1e5
        assert "seconds" not in found


def test_a_pass_that_was_slow_is_not_timed_at_longer_lengths():
    slow = {"length": 128, "passes": {which: {"seconds": 9.0} for which in layers.PASSES}}
    record = measure(Layer("aft_simple", "causal", 256), BUDGET, slow, None)
    for found in record["passes"].values():
        assert found["skipped"] == "a call at 128 tokens took 9.0 s"
    longer = measure(Layer("aft_simple", "causal", 256), BUDGET, record, None)
    assert longer["passes"]["step"]["skipped"] == "a call at 128 tokens took 9.0 s"


def test_slow_exact_attention_is_timed_alone(monkeypatch):
    monkeypatch.setattr(measuring, "_exact_call", lambda *_: pytest.fail("called in rounds"))
    exact = {"passes": {which: {"seconds": 9.0} for which in layers.PASSES}}
    record = measure(Layer("aft_simple", "causal", 128), BUDGET, None, exact)
    for found in record["passes"].values():
        assert found["ratio"] == 9.0 / found["seconds"]


def test_an_error_of_a_mechanism_is_the_reason_in_its_record(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no such layer\nat all")

    monkeypatch.setattr(measuring, "compile_pass", fail)
    record = measure(Layer("aft_simple", "causal", 128), BUDGET, None, None)
    assert record["passes"]["forward"] == {"skipped": "ValueError: no such layer"}


def test_layers_of_a_workload(tmp_path):
    """Batches of short sequences, in bfloat16; the extra tables are left out."""
    argv = ["--features", "64", "--heads", "2", "--precision", "bfloat16", "--tokens", "256"]
    argv += ["--mechanisms", "softmax", "--lengths", "128", "512", "--rounds", "1", "--extras"]
    assert efficiency.main([*argv, "--directions", "causal", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["longest"] and not summary["caches"] and not summary["plain"]
    assert summary["workload"] == dataclasses.asdict(Workload(64, 2, "bfloat16", 256))
    results = {r["length"]: r["passes"]["forward"]["result_bytes"] for r in summary["layers"]}
    assert results == {128: 256 * 64 * 2, 512: 512 * 64 * 2}  # two sequences, and one
    text = (tmp_path / "summary.md").read_text()
    assert "64 features, 2 heads, batches of 256 tokens, bfloat16" in text
    assert not any(w in text for w in ("longest sequence", "Decode caches", "stores its"))


def test_accelerators_compile_many_layers_before_the_first_is_measured(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(measuring.machine, "cores", lambda: 2)
    begun = []
    monkeypatch.setattr(measuring, "_compile", lambda layer: begun.append(layer) or {"of": layer})
    compiled = measuring.compile_layers([1, 2, 3])
    assert next(compiled) == {"of": 1} and sorted(begun) == [1, 2]
    assert [programs["of"] for programs in compiled] == [2, 3]


def test_a_full_process_forgets_its_programs(tmp_path, monkeypatch):
    forgotten = []
    monkeypatch.setattr(measuring.machine, "is_full", lambda: True)
    monkeypatch.setattr(measuring, "forget", lambda: forgotten.append(len(forgotten)))
    monkeypatch.setattr(measuring, "_compile", lambda layer: {})
    config = efficiency.Config(directions=("causal",), lengths=(128,))
    records = efficiency.measure_layers(config, ["softmax", "aft_simple"], tmp_path)
    assert len(records) == 2 and len(forgotten) == 3  # after each layer, and after the length


def test_calls_take_turns():
    order = []
    budget = measuring.Budget(3, 1.0, 1e9)
    times = measuring.in_turns([lambda: order.append(0), lambda: order.append(1)], budget)
    assert order == [0, 1, 0, 1, 1, 0, 0, 1]
    assert [len(each) for each in times] == [3, 3]


@pytest.mark.parametrize("known", [{}, {256: 2560.0}, {256: 2560.0, 2**14: 163840.0}])
def test_the_longest_sequence_is_found_by_bisection(known, monkeypatch):
    """Programs of 10 bytes a token; the memory holds 5,000 tokens."""
    compiled = []

    def layer_at(length):
        return Layer("softmax", "causal", length, Workload(features=1, precision="bfloat16"))

    def compile_pass(layer, which, count):
        compiled.append(layer.length)
        return layers.Program(lambda: None, None, 0, 10 * layer.length, 0, 0)

    monkeypatch.setattr(measuring, "compile_pass", compile_pass)
    assert measuring.longest(layer_at, "step", 50_000.0, known) == 4096
    assert len(compiled) <= 4 and not set(compiled) & set(known)
    assert measuring.longest(layer_at, "step", 1000.0, known) is None


def test_the_crossover_is_interpolated_in_logarithms():
    lengths = (256, 1024, 4096)
    assert theory.crossover(lengths, (4, 2, 0.5), (1, 1, 1)) == pytest.approx(2048)
    assert theory.crossover(lengths, (0.5, 0.4, 0.3), (1, 1, 1)) == 256
    assert theory.crossover(lengths, (0.5, 0.4, 3), (1, 1, 1)) is None
    # A length at which the mechanism is cheaper does not count if a longer one is dearer.
    assert theory.crossover((1, 2, 4, 8), (0.5, 2, 2, 0.5), (1, 1, 1, 1)) > 4


def test_growth_is_fitted_to_the_longer_lengths():
    lengths = [256, 512, 1024, 2048]
    assert theory.growth(lengths, [7, 7, 1, 4]) == pytest.approx(2)
    assert theory.growth([256], [1]) is None


def test_the_bound_of_exact_attention():
    """N^2 H^2 / M entries, and no fewer than queries, keys, values and outputs."""
    assert theory.io_bound(2**16, 64, 1, 2**20) == 4 * 2**32 * 2**12 / 2**18
    assert theory.io_bound(256, 64, 2, 2**20) == 4 * 2 * 4 * 256 * 64


def test_no_ratio_where_tiles_read_keys_again():
    """256 KiB hold the keys and values of one head at 512 tokens, and not at 1,024."""
    sizes = {"argument_bytes": 2e6, "result_bytes": 1e6, "temporary_bytes": 1e6}
    records = [
        {"mechanism": "softmax", "direction": direction, "length": n, "passes": {"forward": sizes}}
        for direction in layers.DIRECTIONS
        for n in (512, 1024)
    ]
    results = tables.Results(records, (), (), (), 0, Workload(256, 4), fast_memory=2**18)
    rows = [line.replace(" ", "") for line in tables.moved(results).splitlines()[2:]]
    assert rows == ["|512|causal,bidirectional|5.0|2.1|2.38|", "|1k|causal,bidirectional|-|4.2|-|"]


def test_times_that_nobody_measured_have_no_figure(tmp_path):
    passes = {which: {"needed_bytes": 1e6} for which in layers.PASSES}
    records = [{"mechanism": "softmax", "direction": "causal", "length": 256, "passes": passes}]
    results = tables.Results(records, (), (), (), 0, Workload(256, 4))
    (line,) = efficiency.draw_all(tmp_path, results)
    assert "memory-step-causal.png" in line
    assert [path.name for path in tmp_path.iterdir()] == ["memory-step-causal.png"]


def test_bytes_per_parameter_agree_with_the_optimisers():
    for name, each in theory.optimisers().items():
        if not isinstance(each.state, str):
            assert theory.state_bytes(each.make) == pytest.approx(each.state, abs=1e-3), name
    adamw = theory.optimisers()["AdamW"]
    assert adamw.weights + adamw.gradients + adamw.state == 16


def test_every_family_has_sequential_operations_and_a_path():
    families = {registry.get(name).family for name in registry.names()}
    assert families <= theory.STEPS.keys()


def test_caches_of_shared_heads_are_smaller():
    found = {
        name: caches.bytes_by_token(layer)
        for mechanism in ("softmax", "sliding_window", "mamba2", "fnet")
        for name, layer in caches.cache_layers(mechanism, 2048, Workload()).items()
    }
    per_token = {name: each for name, (_, each) in found.items()}
    assert per_token == {
        "softmax, multi-head": 2 * 256 * 4,
        "softmax, grouped-query": 256 * 4,
        "softmax, multi-query": 128 * 4,
        "sliding_window": 0,
        "mamba2": 0,
    }
    assert found["mamba2"][0] > 0


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, {"multi-head": 1}),
        (5, {"multi-head": 5, "multi-query": 1}),
        (8, {"multi-head": 8, "grouped-query": 4, "multi-query": 1}),
        (9, {"multi-head": 9, "grouped-query": 3, "multi-query": 1}),
    ],
)
def test_caches_of_any_number_of_heads(heads, expected):
    """Key heads divide the heads, and no two caches are the same."""
    assert caches.key_heads(heads) == expected
    for layer in caches.cache_layers("softmax", 32, Workload(8 * heads, heads)).values():
        caches.bytes_by_token(layer)


def test_steps_after_each_prefix_are_timed():
    seconds = caches.step_seconds(Layer("aft_simple", "causal", 32), (3, 9), rounds=2)
    assert seconds.keys() == {3, 9} and min(seconds.values()) > 0


def test_curves_end_in_time_and_are_drawn(tmp_path):
    points = curves.measure_lengths(("aft_simple",), (128, 256), seconds=60)
    assert [point.length for point in points] == [128, 256]
    assert all(point.seconds > 0 and point.bytes > 0 for point in points)
    curves.draw(tmp_path / "curves.png", points)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert curves.measure_lengths(("aft_simple",), (128, 256), seconds=0) == []


def test_a_layer_that_cannot_be_built_is_named_and_the_others_are_measured(monkeypatch, capsys):
    def compile_pass(layer, which, **options):
        if layer.mechanism == "linear":
            raise ValueError("the layer is too wide\nfor this mechanism")
        return layers.compile_pass(layer, which, **options)

    monkeypatch.setattr(curves, "compile_pass", compile_pass)
    points = curves.measure_lengths(("linear", "aft_simple"), (128,), seconds=60)
    assert [point.mechanism for point in points] == ["aft_simple"]
    said = "not measured: linear with 128 tokens (the layer is too wide)\n"
    assert capsys.readouterr().out == said


def test_lengths_and_bytes_are_short():
    assert [tables.short(n) for n in (300, 4096, 2**20)] == ["300", "4k", "1M"]
    assert tables._bytes(4 * 2**30) == "4 GiB"


@pytest.mark.parametrize("content", ['{"other": 1}', '{"passes": {}}'])
def test_a_damaged_record_is_an_error(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match="is damaged"):
        efficiency.recall(tmp_path / "a.json", efficiency.OF_LAYER, dict)


def test_a_large_family_is_drawn_in_several_panels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    line = [256, 1024], [0.001, 0.01]
    count = figures.MOST_LINES + 3
    families = {
        "exact": {"softmax": line},
        "recurrent": {f"mechanism_{n}": line for n in range(count)},
        "baseline": {"lstm": line},
    }
    path = tmp_path / "figure.png"
    figures.draw_families(path, "Time", figures.SECONDS, families, ("softmax", line))
    panels = {axes.get_title(): axes.get_legend_handles_labels()[1] for axes in drawn[0].axes}
    first, second = panels.pop("recurrent, 1 of 2"), panels.pop("recurrent, 2 of 2")
    assert panels == {"exact": [], "baseline": ["lstm"]}
    assert first + second == list(families["recurrent"]) and len(second) - len(first) in (0, 1)
