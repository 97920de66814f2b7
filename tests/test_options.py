"""The groups of options, and the signatures that they give to functions."""

import inspect
from typing import Any, Unpack, is_typeddict

import jax
import jax.numpy as jnp
import pytest

import effattn
from effattn import options, registry

GROUPS = [group for group in vars(options).values() if is_typeddict(group)]
FUNCTIONS = {
    entry.function.__name__: entry.function
    for entry in map(registry.get, registry.names())
    if entry.takes_heads
}


class Options(options.Direction, options.Padding, options.Execution, total=False):
    """The shared options of `pooling`."""


@options.declared
def pooling(query: jax.Array, *, rate: float, **options: Unpack[Options]) -> Any:
    return query, rate, options


def own(group) -> set[str]:
    """The options that a group declares itself."""
    others = [other for other in GROUPS if other is not group]
    inside = [o for o in others if o.__annotations__.keys() < group.__annotations__.keys()]
    return set(group.__annotations__) - {name for other in inside for name in other.__annotations__}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_each_option_is_documented_in_the_group_that_declares_it(group):
    documented = inspect.cleandoc(group.__doc__)
    assert all(f"\n  {name}: " in documented for name in own(group))


def test_an_option_is_declared_in_one_group():
    declared = [name for group in GROUPS for name in own(group)]
    assert len(declared) == len(set(declared))
    assert options.DEFAULTS.keys() <= set(declared)


def test_the_signature_shows_the_options_of_the_groups():
    parameters = inspect.signature(pooling).parameters
    names = {n for g in (options.Direction, options.Padding, options.Execution) for n in own(g)}
    names |= own(options.Precision) | own(options.Implementation)
    assert (
        list(parameters)[:2] == ["query", "rate"] and set(parameters) == {"query", "rate"} | names
    )
    assert parameters["is_causal"].default is False and parameters["precision"].default is None
    assert parameters["is_causal"].kind is inspect.Parameter.KEYWORD_ONLY


def test_other_arguments_are_refused_as_python_does():
    with pytest.raises(TypeError, match=r"pooling\(\) got an unexpected keyword argument 'sink'"):
        pooling(jnp.ones(3), rate=1.0, sink=None)
    with pytest.raises(TypeError, match=r"argument 'rat'; did you mean rate\?$"):
        pooling(jnp.ones(3), rat=1.0)
    with pytest.raises(TypeError, match="'is_causal'; known are query, key, value, log_decay"):
        effattn.retention(*(jnp.ones((4, 1, 2)),) * 3, is_causal=True)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'rate'"):
        pooling(jnp.ones(3))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'segment_ids'"):
        x = jnp.ones((4, 1, 2))
        given = {"block_size": 2, "sort_projection": x, "segment_ids": jnp.ones(4, int)}
        effattn.sinkhorn_attention(x, x, x, **given)


def test_a_group_must_be_a_typed_dictionary():
    with pytest.raises(TypeError, match=r"must annotate \*\*options as Unpack\[a TypedDict\]"):

        @options.declared
        def untyped(query, **options): ...


def test_values_are_checked_by_their_annotations():
    with pytest.raises(ValueError, match="is_causal must be True or False, got 'no'"):
        pooling(jnp.ones(3), rate=1.0, is_causal="no")
    _, _, given = pooling([1.0], rate=1.0, query_seq_lengths=[1])
    assert given["query_seq_lengths"].shape == (1,)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_shared_options_in_groups_alone(name):
    """Each shared option is declared once, in `effattn.options`."""
    code = FUNCTIONS[name].__wrapped__.__code__
    named = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    grouped = {n for group in GROUPS for n in group.__annotations__}
    # These three may also be arguments of a function's own: a window that is part of the meaning, a
    # scale in the formula, and a chunk size on which the state depends.
    assert named & grouped <= {"local_window_size", "scale", "chunk_size"}
    assert "**options: " in FUNCTIONS[name].__doc__
