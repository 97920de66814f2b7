"""Facts, description, formula, options and results of one mechanism, for the pages about it."""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from effattn import options, registry
from effattn.advice import facts, quality
from effattn.dispatch.support import support
from effattn.registry import Mechanism


class Option(NamedTuple):
    """An option of a function or layer.

    Attributes:
      name: name of the argument.
      default: its default value, None if the option is required.
      in_layers: the value that layers give a function, None if it is the default value.
      text: meaning of the option.
    """

    name: str
    default: str | None
    in_layers: str | None
    text: str


def facts_of(entry: Mechanism) -> dict[str, str]:
    """Returns facts by name, in plain words."""
    kind = facts.kind(entry)
    found = {
        "family": entry.family,
        "kind": f"{kind}, {facts.KINDS[kind]}",
        "direction": facts.directions(entry),
        "time": entry.complexity,
        "memory": f"O({_power(entry.memory_exponent)})",
        "drawbacks": "; ".join(facts.gives_up(entry)),
        "paper": entry.paper,
    }
    if entry.function is not None:
        found["function"] = f"effattn.{entry.function.__name__}"
    return {**found, "layer": entry.mixer, "source": module_of(entry)}


def _power(exponent):
    return "N" if exponent == 1 else f"N^{exponent:g}"


def module_of(entry: Mechanism) -> str:
    """Returns the module that has the formula of the mechanism."""
    own = f"effattn.functional.{entry.name}"
    if own in sys.modules:
        return own
    return (entry.function or registry.load(entry.builder)).__module__


def description(entry: Mechanism) -> list[str]:
    """Returns the paragraphs of the docstring up to its list of arguments."""
    text = inspect.getdoc(entry.function or registry.load(entry.builder)) or ""
    text = re.split(r"\n(?=Args:|Returns:|Raises:)", text)[0].strip()
    return re.split(r"\n\s*\n", text)


def formula(entry: Mechanism) -> str:
    """Returns the source of the naive form, and of the functions of its file that it calls."""
    naive: Any = entry.naive
    if naive is None:
        return ""
    module = sys.modules[naive.__module__]
    # A variant, such as one with a window, has another name.
    function = getattr(module, "naive", None) or getattr(module, naive.__name__, naive)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    helpers = [getattr(module, name, None) for name in names]
    own = [h for h in helpers if inspect.isfunction(h) and h.__module__ == module.__name__]
    try:
        sources = (inspect.getsource(each).rstrip() for each in dict.fromkeys([function, *own]))
        return "\n\n".join(sources)
    except (OSError, TypeError):  # no source file
        return ""


def is_shared(option: str) -> bool:
    """Returns whether functions share an option, by a group of `effattn.options`."""
    groups = [group for group in vars(options).values() if isinstance(group, type)]
    return any(option in getattr(group, "__annotations__", ()) for group in groups)


def options_of(entry: Mechanism) -> dict[str, list[Option]]:
    """Returns the options of the function, if there is one, and those of the layer alone."""
    found = {}
    if entry.function is not None:
        parameters = inspect.signature(entry.function).parameters
        named = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        found[f"effattn.{entry.function.__name__}"] = _options(
            named, entry.options if entry.takes_heads else {}, entry.function, vars(options)
        )
    layer: Any = registry.load(entry.builder)
    own = entry.mixer_options() - {"args", "kwargs", "options"}
    is_class = isinstance(layer, type)
    # The metaclass of Flax's modules hides the signature of a class.
    parameters = inspect.signature(layer.__init__ if is_class else layer).parameters
    named = {n: p for n, p in parameters.items() if n in own}
    defaults = {} if entry.takes_heads else entry.options
    shared = vars(importlib.import_module("effattn.nn.options"))
    return {**found, entry.mixer: _options(named, defaults, layer, shared)}


def _options(
    parameters: Mapping[str, inspect.Parameter],
    defaults: Mapping[str, Any],
    documented: Any,
    groups: Mapping[str, Any],
) -> list[Option]:
    shared = {
        name: text
        for group in groups.values()
        if isinstance(group, type)
        for name, text in _described(inspect.getdoc(group) or "").items()
    }
    texts = {**shared, **_described(inspect.getdoc(documented) or "")}
    found = []
    for name, parameter in parameters.items():
        default = None if parameter.default is parameter.empty else _shown(parameter.default)
        in_layers = _shown(defaults[name]) if name in defaults else default
        in_layers = None if in_layers == default else in_layers
        found.append(Option(name, default, in_layers, texts.get(name, "")))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return getattr(value, "__name__", None) or repr(value)


def _described(docstring: str) -> dict[str, str]:
    """Descriptions by name from the sections "Args" and "Attributes" of a docstring."""
    found = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)", docstring, re.M):
        items = re.findall(r"^  (\*{0,2}[\w, ]+): (.*(?:\n    .*)*)", section, re.M)
        for names, text in items:
            for name in names.split(", "):
                found[name.strip("*")] = " ".join(text.split())
    return found


def implementations(entry: Mechanism) -> list[str]:
    """Returns a line for each implementation: where it runs, its dtypes and limits."""
    rows = [
        f"{row.implementation}: on {'any device' if row.platform == 'any' else row.platform}; "
        f"{', '.join(row.dtypes)}"
        + ("" if row.size is None else f"; head size up to {row.size}")
        + (f"; {row.others}" if row.others else "")
        for row in support(entry.name)
    ]
    return rows or ["plain JAX, on any device"]


def results(entry: Mechanism) -> list[str]:
    """Returns a line for each measured quality."""
    found = [
        f"{each.task} ({'causal' if each.is_causal else 'bidirectional'}): {each.in_words} "
        f"({each.source})"
        for each in quality.read()
        if each.mechanism == entry.name
    ]
    return found or ["none yet: results in fewer than three tasks"]
