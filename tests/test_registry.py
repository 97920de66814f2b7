"""The registry: its entries, its refusals, and its independence from Flax."""

import inspect
import pathlib
import re

import pytest
from flax import nnx

import effattn
from effattn import registry


def entry(**changes):
    return registry.Mechanism(
        **{
            "name": "nothing",
            "family": "none",
            "paper": "Nobody 1900, Nothing",
            "function": lambda query, key, value: value,
            "capabilities": frozenset(),
            "complexity": "O(1)",
            "time_exponent": 0.0,
            **changes,
        }
    )


@pytest.fixture
def scratch(monkeypatch):
    """A registry whose changes are undone."""
    monkeypatch.setattr(registry, "_MECHANISMS", dict(registry._MECHANISMS))


@pytest.mark.parametrize("name", registry.names())
def test_an_entry_is_true_to_its_function(name):
    mechanism = registry.get(name)
    # The docstring names the publication.
    authors = mechanism.paper.split()[0]
    builder = registry.load(mechanism.builder)
    assert callable(builder)
    if not mechanism.takes_heads:
        assert authors in (builder.__doc__ or "")
        assert getattr(effattn.nn, builder.__name__) is builder
        assert ("decode" in mechanism.capabilities) == hasattr(builder, "extend")
    function = mechanism.function
    if function is None:
        return
    assert getattr(effattn, function.__name__) is function
    parameters = inspect.signature(function).parameters
    # A signature has only the options that the function honours.
    kinds = {p.kind for p in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert authors in (function.__doc__ or "")
    if mechanism.takes_heads:
        assert mechanism.options.keys() <= parameters.keys()
        assert ("decode" in mechanism.capabilities) == (mechanism.decoder is not None)
        if mechanism.decoder is not None:
            assert callable(registry.load(mechanism.decoder))


def test_mixers_have_options_of_their_own():
    assert registry.get("softmax").mixer_options() == frozenset()
    own = {"max_length", "num_projected", "method", "sharing", "projection"}
    assert registry.get("linformer").mixer_options() == own
    assert "max_global" in registry.get("longformer").mixer_options()


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(
        ValueError,
        match="unknown mechanism 'sotfmax'; registered are softmax, .*; did you mean softmax",
    ):
        registry.get("sotfmax")


def test_names_by_capability():
    assert registry.names()[0] == "softmax"
    assert registry.names("bias") == tuple(
        name for name in registry.names() if "bias" in registry.get(name).capabilities
    )
    with pytest.raises(ValueError, match="unknown capability 'biases'; known are"):
        registry.names("biases")


def test_what_takes_no_heads_has_a_mixer_of_its_own(scratch):
    with pytest.raises(
        ValueError, match="'nothing' with takes_heads=True needs function, got None"
    ):
        entry(function=None)
    with pytest.raises(ValueError, match="'nothing' with takes_heads=False needs builder"):
        entry(takes_heads=False)
    with pytest.raises(ValueError, match="'fnet' has no option num_kv_heads, size; "):
        registry.get("fnet").build(8, 2, size=3, num_kv_heads=1)


def test_an_option_that_a_mixer_needs_is_named():
    with pytest.raises(ValueError, match="the mixer of 'hyena' needs max_length: give it"):
        registry.get("hyena").build(8, 2, rngs=nnx.Rngs(0))


def test_a_module_registers_its_own_names(scratch):
    """Also again, as a cell of a notebook does that runs twice."""
    registry.register(entry())
    again = registry.register(entry(complexity="O(1)"))
    assert registry.names()[-1] == "nothing" and registry.get("nothing") is again
    with pytest.raises(ValueError, match=r"'softmax' is registered already, by effattn\.func"):
        registry.register(entry(name="softmax"))


def test_capabilities_are_known_ones():
    with pytest.raises(ValueError, match=r"claims unknown capabilities \['flying'\]; known are"):
        entry(capabilities=frozenset({"causal", "flying"}))


def test_the_readme_links_to_a_page_of_each_mechanism():
    root = pathlib.Path(effattn.__file__).parents[1]
    readme = root / "README.md"
    if not readme.exists():
        pytest.skip("installed without its README")
    linked = re.findall(r"\[`(\w+)`\]\(docs/mechanisms/(\w+)\.md\)", readme.read_text())
    assert sorted(linked) == sorted((name, name) for name in registry.names())
    pages = {path.stem for path in (root / "docs" / "mechanisms").glob("*.md")} - {"index"}
    assert pages == {*registry.names()}
