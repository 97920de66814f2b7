"""`effattn.tune`: its measurements, their use by later calls, and the file that keeps them."""

import functools
import json
import pathlib
import platform
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn import dispatch
from effattn.cores import block_attention
from effattn.dispatch import cache, tuning
from effattn.dispatch.cache import Choice
from effattn.llvm import runtime
from effattn.pallas.triton import block_attention as block_triton
from effattn.xla import block_attention as block_xla
from tests.marks import slow
from tests.pallas.lowering import TRITON, kernels_of

CALL = functools.partial(effattn.dot_product_attention, is_causal=True)
TILES = (("forward", (20, 20)),)
CACHE_FILE = cache.cache_file  # the function itself, which the suite replaces
# Untuned float32 calls take the CPU kernels on machines where these were measured to be faster.
_HAS_KERNELS = runtime.refusal() is None and platform.machine() in ("x86_64", "AMD64")
UNTUNED = dispatch.Chosen(("llvm", "xla") if _HAS_KERNELS else ("xla",))


def calls_of(function, *arguments):
    """Calls that can be tuned: their candidates, and whether they have gradients."""
    trial = cache.Trial({})
    with trial.running():
        jax.eval_shape(lambda *arguments: function(*arguments), *arguments)
    return trial.called


def signature_of(function, *arguments):
    (signature,) = calls_of(function, *arguments)
    return signature


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(1, 40, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]


@pytest.fixture
def fastest(monkeypatch):
    """`fastest(choice, ...)` makes each choice faster than those before it and than all others."""

    def be(*choices):
        def time(_, programs):
            rank = {choice: place for place, choice in enumerate(choices, 1)}
            return {choice: 0.5 ** rank.get(choice, 0) for choice in programs}

        monkeypatch.setattr(tuning._Bench, "time", time)

    return be


@pytest.fixture
def only_traced(monkeypatch):
    """Replaces compilation by tracing, for tests that do not depend on results of programs."""

    def compile(bench, choices):
        with cache.Trial(choices).running():
            jax.eval_shape(
                lambda *operands: bench.function(*operands), bench.floating, bench.others
            )
        return lambda *_: []

    monkeypatch.setattr(tuning._Bench, "compile", compile)


@pytest.fixture
def kernels(monkeypatch):
    """Runs the Triton kernels here, interpreted."""
    monkeypatch.setattr(tuning, "_is_kernel_here", lambda name: name == "triton")
    monkeypatch.setattr(block_triton, "_MORE_TILES", ((128, 64, 4),))
    with dispatch.interpreted():
        yield


def taken(function, *arguments):
    """Implementations that the block-attention calls of the function take."""
    found = []
    original = block_attention.block_attention

    def spy(rule, x):
        found.append(rule.implementations)
        return original(rule, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "block_attention", spy)
        jax.eval_shape(lambda *arguments: function(*arguments), *arguments)
    return found


def test_a_call_takes_the_default_before_and_what_was_fastest_after(arrays, fastest, only_traced):
    assert taken(CALL, *arrays) == [UNTUNED]
    best = Choice("xla", (("forward", (20, 20)),))
    fastest(best)
    done = effattn.tune(CALL, *arrays)
    (call,) = done.chosen
    assert done.chosen[call] == best
    assert taken(CALL, *arrays) == [dispatch.Chosen(("xla",), tiles=best.tiles)]
    # Tuning applies to no other option and to no other shape.
    assert taken(effattn.dot_product_attention, *arrays) == [UNTUNED]
    assert taken(CALL, *(x[:, :20] for x in arrays)) == [UNTUNED]
    # All lengths up to the next power of two share a result, and tiles are cut to the length.
    assert taken(CALL, *(x[:, :33] for x in arrays)) == [
        dispatch.Chosen(("xla",), tiles=best.tiles)
    ]
    shorter = [x[:, :33] for x in arrays]
    exact = effattn.dot_product_attention(*shorter, is_causal=True, tile=(33, 33))
    np.testing.assert_allclose(CALL(*shorter), exact, atol=1e-5)
    # A named implementation is taken.
    (named,) = taken(functools.partial(CALL, implementation="xla"), *arrays)
    assert named == dispatch.XLA


@pytest.fixture
def beside(monkeypatch):
    """Simulates a machine with some GPUs of a given compute capability."""

    def gpus(capability, count=1):
        device = types.SimpleNamespace(
            compute_capability=capability,
            client=types.SimpleNamespace(platform_version="cuda 13000"),
        )
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "device_count", lambda: count)
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device] * count)

    return gpus


def half(length, dtype=jnp.bfloat16):
    return [np.ones((1, length, heads, 16), dtype) for heads in (4, 2, 2)]


KERNELS = dispatch.Chosen(("mosaic_gpu", "triton", "xla"))


def test_untuned_calls_take_kernels_on_one_hopper_gpu(beside):
    """The default takes kernels for 16-bit calls of at least one tile, where they were faster."""
    beside("9.0")
    assert taken(CALL, *half(128)) == [KERNELS]
    assert taken(CALL, *half(127)) == taken(CALL, *half(128, np.float32)) == [dispatch.XLA]
    named = functools.partial(CALL, implementation="xla")
    assert taken(named, *half(128)) == [dispatch.XLA]
    # Also on other GPUs from Ampere on: the Mosaic GPU kernels refuse them, those of Triton run.
    for capability in ("8.0", "8.9", "12.0"):
        beside(capability)
        assert taken(CALL, *half(128)) == [dispatch.Chosen(("triton", "xla"))]
    beside("7.5")
    cache.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"from compute capability 8\.0, got 7\.5"):
        assert taken(CALL, *half(128)) == [dispatch.XLA]


@pytest.mark.devices
def test_untuned_calls_take_kernels_on_several_gpus(beside):
    """Each GPU runs them for its part, also in `shard_map`, but there over all mesh axes alone."""
    beside("9.0", 4)
    assert taken(CALL, *half(128)) == [KERNELS]
    mesh = jax.make_mesh((2, 2), ("batch", "x"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = PartitionSpec("batch")
    arrays = [np.concatenate([x, x]) for x in half(128)]
    over = functools.partial(jax.shard_map, CALL, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert taken(over(), *arrays) == [KERNELS]
    cache.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="inside a jax.shard_map over some of the mesh axes"):
        assert taken(over(axis_names={"batch"}), *arrays) == [dispatch.XLA]


def test_a_gpu_user_is_told_once_why_a_call_takes_xla(beside, recwarn):
    cache.warn_once.cache_clear()
    beside("9.0")
    for _ in range(2):
        assert taken(effattn.sigmoid_attention, *half(128)) == [dispatch.XLA]
    attend = functools.partial(effattn.linear_attention, is_causal=True)
    beside("8.0")
    jax.eval_shape(attend, *half(128))
    # No warning where XLA is asked for, nor for short calls, which XLA runs as fast.
    jax.eval_shape(functools.partial(attend, implementation="xla"), *half(128))
    jax.eval_shape(attend, *half(127))
    told = [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    assert len(told) == 2
    assert "takes a softmax of the logits, not sigmoid" in told[0]
    assert "kernels are the default from compute capability 9.0 to 9.9, got 8.0" in told[1]


def test_untuned_recurrences_take_kernels_on_one_hopper_gpu(beside):
    beside("9.0")
    attend = functools.partial(effattn.linear_attention, is_causal=True)
    for length, kernels in ((128, {TRITON}), (127, set())):
        assert kernels_of(attend, *half(length)) == kernels


def test_rwkv7_takes_kernels_if_they_are_named(beside):
    beside("9.0")
    query, key, value = half(128)
    of_features = {"removal_key": key, "learning_rate": key, "log_decay": -(key**2)}
    for named, kernels in ((None, set()), ("triton", {TRITON})):
        attend = functools.partial(effattn.rwkv7_attention, **of_features, implementation=named)
        assert kernels_of(attend, query, key, value) == kernels


def test_tuning_starts_from_xla_beside_a_gpu(beside, only_traced):
    beside("9.0")
    trial = cache.Trial({})
    with trial.running():
        assert taken(CALL, *half(128)) == [dispatch.XLA]


def test_it_really_measures(arrays, monkeypatch):
    """Each kernel is measured with its default tile and with one other tile."""
    tilings = block_xla.tilings
    monkeypatch.setattr(
        block_xla, "tilings", lambda *call: {k: tiles[:1] for k, tiles in tilings(*call).items()}
    )
    # The CPU kernels do not take a mask of pairs.
    mask = np.tri(40, dtype=bool)[None, None]
    done = effattn.tune(functools.partial(CALL, mask=mask), *arrays, rounds=2)
    rows = [row for row in done.rows if row.seconds is not None]
    assert {row.choice.implementation for row in rows} == {"xla"}
    kernels = {kernel for row in rows for kernel, _ in row.choice.tiles}
    assert kernels == {"forward", "backward"}
    assert all(row.seconds > 0 for row in rows)
    text = str(done)
    assert all(f"| {row.choice} | {row.seconds * 1e3:.3f} |" in text for row in rows)
    assert len({row.choice for row in done.rows}) == len(done.rows)


def test_what_takes_seconds_is_measured_less_often():
    seconds = {"short": 0.1, "long": 1.5, "longest": 9.0}
    called = []
    bench = types.SimpleNamespace(
        rounds=5, _seconds=lambda program: called.append(program) or seconds[program]
    )
    assert tuning._Bench.time(bench, {name: name for name in seconds}) == seconds
    assert [called.count(name) for name in seconds] == [5, 2, 1]


@pytest.mark.slow
def test_a_kernel_is_taken_with_the_tiles_that_were_fastest(arrays, fastest, kernels, only_traced):
    tiles = ("forward", (128, 64, 4)), ("query", (128, 64, 4))
    fastest(Choice("triton"), Choice("triton", tiles[:1]), Choice("triton", tiles))
    done = effattn.tune(CALL, *arrays)
    assert {*done.chosen.values()} == {Choice("triton", tiles)}
    assert taken(CALL, *arrays) == [dispatch.Chosen(("triton", "xla"), True, tiles)]
    np.testing.assert_allclose(CALL(*arrays), CALL(*arrays, implementation="xla"), atol=1e-5)


def test_a_program_for_a_gpu_has_the_kernel(arrays):
    call = signature_of(CALL, *arrays)
    assert not kernels_of(CALL, *arrays)
    cache.save({call: Choice("triton")})
    assert kernels_of(lambda *arrays: CALL(*arrays), *arrays) == {TRITON}  # a new program
    # XLA runs the call where the tuned kernel does not run or does not take the arguments.
    np.testing.assert_allclose(CALL(*arrays), CALL(*arrays, implementation="xla"), atol=1e-6)
    cache.save({call: Choice("mosaic_tpu", (("all", (128, 128)),))})
    halves = [x.astype(jnp.float16) for x in arrays]
    cache.save({signature_of(CALL, *halves): Choice("mosaic_tpu", (("all", (128, 128)),))})
    assert taken(CALL, *halves) == [dispatch.XLA]


def test_what_disagrees_or_does_not_compile_is_not_taken(arrays, fastest, kernels, monkeypatch):
    fastest(Choice("triton"))
    monkeypatch.setattr(block_xla, "tilings", lambda *call: {})
    right = block_triton.forward

    def wrong(config, x, exact):
        found = right(config, x, exact)
        return found._replace(out=found.out * 1.1)

    # Each length is used by no other test, because JAX keeps traces.
    for form, reason, length in (
        (wrong, "_Disagrees: results must differ", 31),
        (None, "TypeError: 'NoneType'", 30),
    ):
        monkeypatch.setattr(block_triton, "forward", form)
        done = effattn.tune(CALL, *(x[:, :length] for x in arrays), gradients=False)
        (row,) = [row for row in done.rows if row.choice.implementation == "triton"]
        assert row.seconds is None and row.reason.startswith(reason)
        assert reason in str(done)
        assert {choice.implementation for choice in done.chosen.values()} == {"xla"}


@pytest.mark.parametrize(
    "name",
    [
        "xla",
        *(slow(n) for n in ("triton", "mosaic_gpu", "mosaic_tpu")),
    ],
)
def test_every_tile_to_try_gives_the_same(name):
    """Each kernel of block attention runs with one set of tiles, interpreted."""
    if name == "mosaic_gpu" and jax.__version_info__ < (0, 12):
        pytest.skip("Mosaic GPU is interpreted by jax 0.12 and later")
    rng = np.random.default_rng(0)
    tokens = 150 if name == "mosaic_gpu" else 300  # the interpreter of Mosaic GPU is the slowest
    x = rng.normal(size=(1, tokens, 1, 64)).astype(jnp.bfloat16)
    ((signature, (takes, differentiable)),) = calls_of(CALL, x, x, x).items()
    assert differentiable and name in takes
    tiles = tuple((kernel, sizes[-1]) for kernel, sizes in takes[name].items())
    assert all(sizes for sizes in takes[name].values())
    bench = tuning._Bench(CALL, (x, x, x), {}, True, 1)
    with dispatch.interpreted():
        bench.compile({signature: Choice(name, tiles)})  # `compile` checks the results


def test_every_call_of_a_model_is_tuned(fastest, only_traced):
    x = jnp.ones((1, 16, 2, 16))

    def model(x):
        y = effattn.sliding_window_attention(x, x, x, local_window_size=4)
        return effattn.retention(y, y, y, chunk_size=8).sum()

    fastest()
    done = effattn.tune(model, x, gradients=False)
    calls = sorted(done.chosen)
    assert [call.split(",")[0] for call in calls] == ["block attention", "linear recurrence"]


def test_paged_attention_is_measured_without_gradients():
    pages, table = jnp.ones((4, 16, 2, 8)), jnp.arange(4).reshape(2, 2)
    done = effattn.tune(
        effattn.paged_attention,
        jnp.ones((2, 1, 4, 8)),
        pages,
        pages,
        block_table=table,
        lengths=jnp.array([20, 9]),
        rounds=1,
    )
    (call,) = done.chosen
    assert call.startswith("paged attention, float32")


def test_calls_that_name_an_implementation_cannot_be_tuned(arrays):
    with pytest.raises(
        ValueError, match="dot_product_attention must call .* got none; leave `impl"
    ):
        effattn.tune(effattn.dot_product_attention, *arrays, implementation="xla")


# The file


@pytest.fixture
def kept(arrays):
    """The path of the file after a call was tuned."""
    cache.save({signature_of(CALL, *arrays): Choice("xla", TILES)})
    cache.measured.cache_clear()  # simulates another process
    return cache.cache_file()


def test_what_decides_the_implementation_is_part_of_the_key(arrays):
    query, key, value = arrays
    bias = np.zeros((1, 4, 40, 40), np.float32)
    of_keys = bias[..., :1, :]
    signatures = [
        signature_of(CALL, *arrays),
        signature_of(lambda scale: CALL(*arrays, scale=scale), jnp.float32(0.3)),
        signature_of(functools.partial(CALL, bias=bias), *arrays),
        signature_of(functools.partial(CALL, bias=of_keys), *arrays),
    ]
    pages = np.zeros((2, 16, 2, 16), np.float32)
    given = {"block_table": np.array([[0, 1]]), "lengths": np.array([20])}
    paged = functools.partial(effattn.paged_attention, query[:, :1], pages, pages, **given)
    signatures += [signature_of(functools.partial(paged, local_window_size=w)) for w in (None, 8)]
    assert len({*signatures}) == len(signatures)


def test_results_of_two_processes_are_both_kept(kept, arrays):
    cache.save({"another call": Choice("xla")})
    cache.measured.cache_clear()
    cache.measured()
    # Another process writes its result after this one has read the file.
    path = cache.cache_file()
    entries = json.loads(path.read_text())
    theirs = [{**entry, "call": f"{entry['call']} of theirs"} for entry in entries["measured"]]
    path.write_text(json.dumps({**entries, "measured": theirs}))
    cache.save({"a third call": Choice("xla")})
    calls = {entry["call"] for entry in json.loads(path.read_text())["measured"]}
    assert {"another call of theirs", "another call", "a third call"} <= calls


def test_another_process_reads_it(kept, arrays):
    assert taken(CALL, *arrays) == [dispatch.Chosen(("xla",), tiles=TILES)]
    cache.save({"another call": Choice("triton")})
    cache.measured.cache_clear()
    assert taken(CALL, *arrays) == [dispatch.Chosen(("xla",), tiles=TILES)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace("20", "-20"),
        lambda text: text.replace('"xla"', "7"),
        lambda text: text.replace('"implementation"', '"other"'),
        lambda text: "[" * 200_000,
        lambda text: "\x00\xff",
    ],
    ids=["empty", "half", "another thing", "format", "size", "type", "key", "nested", "bytes"],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_replaced(kept, arrays, damage):
    kept.write_text(damage(kept.read_text()))
    with pytest.warns(RuntimeWarning, match="tuning.json is ignored"):
        assert taken(CALL, *arrays) == [UNTUNED]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(CALL, *arrays) == [UNTUNED]  # the warning is given once
        cache.save({signature_of(CALL, *arrays): Choice("xla", TILES)})
        cache.measured.cache_clear()
        assert taken(CALL, *arrays)[0].tiles == TILES


@pytest.mark.parametrize("what", ["jax", "device"])
def test_what_was_measured_elsewhere_is_not_taken(kept, arrays, what):
    data = json.loads(kept.read_text())
    for entry in data["measured"]:
        entry[what] = "another"
    kept.write_text(json.dumps(data))
    if what == "jax":
        with pytest.warns(RuntimeWarning, match="tuned with jax another.*call effattn.tune again"):
            assert taken(CALL, *arrays) == [UNTUNED]
    assert taken(CALL, *arrays) == [UNTUNED]


def test_an_unknown_implementation_in_the_file_is_ignored(kept, arrays):
    kept.write_text(kept.read_text().replace('"xla"', '"of the future"'))
    assert taken(CALL, *arrays) == [UNTUNED]


def test_where_nothing_can_be_written_it_holds_for_the_process(arrays, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "cache_file", lambda: tmp_path / "file" / "tuning.json")
    with pytest.warns(RuntimeWarning, match="for this process alone"):
        cache.save({signature_of(CALL, *arrays): Choice("xla", TILES)})
    assert taken(CALL, *arrays)[0].tiles == TILES


@pytest.mark.parametrize("damage", ["a tile of one size", "an unknown kernel"])
def test_tiles_of_another_kind_in_the_file_are_ignored(kept, arrays, damage):
    data = json.loads(kept.read_text())
    one_size = damage == "a tile of one size"
    data["measured"][0]["tiles"] = {"forward": [20]} if one_size else {"sideways": [20, 20]}
    kept.write_text(json.dumps(data))
    assert taken(CALL, *arrays) == [UNTUNED]


def test_a_folder_in_place_of_the_file_ends_nothing(kept, arrays):
    kept.unlink()
    kept.mkdir()
    with pytest.warns(RuntimeWarning, match="tuning.json is ignored"):
        assert taken(CALL, *arrays) == [UNTUNED]
    with pytest.warns(RuntimeWarning, match="for this process alone"):
        cache.save({signature_of(CALL, *arrays): Choice("xla", TILES)})
    assert taken(CALL, *arrays)[0].tiles == TILES
    assert [*kept.parent.iterdir()] == [kept]  # no half-written file is left


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "home",
    [
        lambda _: _raise(RuntimeError("could not determine the home directory")),
        lambda _: pathlib.Path("~/.cache/effattn"),
    ],
    ids=["refused", "left as it is"],
)
def test_a_user_without_a_home_folder_calls_and_tunes(arrays, monkeypatch, home):
    """Without a home folder, a release of platformdirs raises an error or leaves the `~`."""
    monkeypatch.setattr(cache.platformdirs, "user_cache_path", home)
    monkeypatch.setattr(cache, "cache_file", CACHE_FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(CALL, *arrays) == [UNTUNED]
    with pytest.warns(RuntimeWarning, match="for this process alone: .* set HOME"):
        cache.save({signature_of(CALL, *arrays): Choice("xla", TILES)})
    assert taken(CALL, *arrays)[0].tiles == TILES


def test_what_this_user_may_not_read_is_not_there(kept, arrays, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: _raise(PermissionError("read")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(CALL, *arrays) == [UNTUNED]
