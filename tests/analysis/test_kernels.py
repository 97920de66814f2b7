"""`effattn.check`: kernels that are right pass, and each way to be wrong is found."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import __main__, dispatch
from effattn.analysis import kernels
from effattn.llvm import block_attention, runtime

ALL = kernels.cases
LLVM = pytest.mark.skipif(runtime.refusal() is not None, reason="this machine has no CPU kernels")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Two calls, of which the CPU kernels take the first."""
    every = list(ALL())
    taken = next(case for case in every if case.name.startswith("dot_product_attention, 129"))

    def halved(arrays, **options):
        halve = {"score_mod": lambda logit, *_: logit / 2}
        return effattn.dot_product_attention(**arrays, **halve, **options)

    some = [taken, taken._replace(name="dot_product_attention with a score_mod", call=halved)]
    monkeypatch.setattr(kernels, "cases", lambda: iter(some))
    return some


@pytest.fixture
def broken(monkeypatch):
    """Replaces the output of the CPU kernels by a function of it."""

    def breaks(change):
        forward = block_attention.forward

        def wrong(*call):
            found = forward(*call)
            return found._replace(out=change(found.out))

        monkeypatch.setattr(block_attention, "forward", wrong)
        jax.clear_caches()

    yield breaks
    monkeypatch.undo()
    jax.clear_caches()


def test_the_cases_are_the_shapes_that_compilers_break():
    sizes = {(129, 64), (192, 64), (64, 64), (1, 64)}
    every = list(ALL())
    assert sizes <= {case.arrays["query"].shape[1::2] for case in every}
    assert any(case.kept == {"bias"} for case in every)
    assert any(case.arrays["query"].shape[1] == 1 < case.arrays["key"].shape[1] for case in every)


@LLVM
def test_right_kernels_pass():
    found = effattn.check()
    ran = [row for row in found.rows if row.errors]
    assert found.passed and ran
    assert all(set(row.errors) == {"output", "query", "key", "value"} for row in ran)
    assert all(0 < error < 1e-5 for row in ran for error in row.errors.values())
    refused = [row.reason for row in found.rows if row.reason]
    assert refused and all("implementation" in reason for reason in refused)
    text = str(found)
    assert "| dot_product_attention, 129 tokens of 64 | llvm | float32 |" in text
    assert "1 kernels and calls ran, none failed; 1 calls are not taken by a kernel." in text


@LLVM
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * (1 + 1e-5),
        lambda x: x.at[0, 0, 0, 0].set(jnp.nan),
        lambda x: x.at[:, -1].set(0),
    ],
    ids=["error", "NaN", "last row"],
)
def test_wrong_results_fail(broken, change, capsys):
    broken(change)
    found = effattn.check()
    (row,) = (row for row in found.rows if row.errors)
    assert row.failed and not found.passed
    assert f"| {row.worst} | " in str(found) and "| FAILED |" in str(found)
    assert __main__.main(["check"]) == 1
    assert "1 failed" in capsys.readouterr().out


@LLVM
def test_a_kernel_that_raises_fails_and_the_others_are_checked(broken):
    def raises(_):
        raise RuntimeError("ptxas fatal\nmore lines")

    broken(raises)
    found = effattn.check()
    assert [row.reason for row in found.rows if row.failed] == ["RuntimeError: ptxas fatal"]
    assert "| RuntimeError: ptxas fatal | | | FAILED |" in str(found)
    assert len(found.rows) == 2


def test_the_table_shows_the_array_that_failed():
    of_xla = {"output": 1e-9, "query": 1e-3}
    row = kernels.Row("call", "llvm", "float32", {"output": 2e-8, "query": 4e-3}, of_xla, "", True)
    assert row.worst == "query" and row.too_large  # 20 times XLA, but below two roundings
    within = row._replace(errors={"output": 2e-8, "query": 2e-3})
    assert not within.too_large
    assert row._replace(errors={"output": float("nan"), "query": 4e-3}).worst == "output"


def test_errors_that_are_not_finite_are_texts_in_json():
    errors = {"output": float("nan"), "query": float("inf"), "key": 0.5}
    row = kernels.Row("call", "llvm", "float32", errors, dict.fromkeys(errors, 0.0), "", True)
    content = json.loads(kernels.Checked("cpu", (row,)).to_json(), parse_constant=pytest.fail)
    assert content["rows"][0]["errors"] == {"output": "nan", "query": "inf", "key": 0.5}


def test_the_command_writes_json(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    assert __main__.main(["check", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["passed"] and len(content["rows"]) == 2
    assert content["jax"] and content["effattn"] == effattn.__version__
    assert "against float64" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nonsense", "mosaic_tpu", "xla"])
def test_kernels_of_other_platforms_are_refused(name, capsys):
    assert __main__.main(["check", "--implementations", name]) == 2
    error = capsys.readouterr().err
    assert f"implementations must be kernels for cpu: llvm; got '{name}'" in error


def test_interpreted_kernels_are_checked_too(few):
    with dispatch.interpreted():
        found = effattn.check(("triton",))
    assert found.passed and all(row.errors for row in found.rows) and len(found.rows) == len(few)


def test_interpreted_kernels_must_exist_too():
    with dispatch.interpreted(), pytest.raises(ValueError, match="must be kernels: .*'nonsense'"):
        effattn.check(("nonsense",))


def test_errors_of_small_arrays_are_relative_to_the_others():
    """A gradient of zero is a difference of products as large as the others."""
    exact = {"output": np.full(4, 2.0), "query": np.zeros(4), "key": np.full(4, 1e-5)}
    found = {"output": np.full(4, 2.0), "query": np.full(4, 1e-6), "key": np.full(4, 2e-5)}
    errors = kernels._errors(found, exact)
    of_key = pytest.approx(1e-5 / 2e-3)
    assert errors == {"output": 0, "query": pytest.approx(1e-6 / 2), "key": of_key}
