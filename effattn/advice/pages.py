"""Pages about mechanisms as text of 80 columns: the list of all, and one in detail."""

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from effattn import options, registry
from effattn.advice import facts, quality
from effattn.dispatch.support import support
from effattn.registry import Mechanism

WIDTH = 80


def catalogue(needs: Sequence[str] = (), kind: str | None = None, family: str | None = None) -> str:
    """Returns a list of mechanisms by family, two lines or more each.

    Args:
      needs: capabilities that all listed mechanisms have.
      kind: key of `effattn.advice.facts.KINDS`; None for all.
      family: name of a family; None for all.

    Raises:
      ValueError: an unknown name, or no such mechanism.
    """
    for capability in needs:
        facts.check_capability(capability)
    every = [registry.get(name) for name in registry.names()]
    families = tuple(dict.fromkeys(entry.family for entry in every))
    if family is not None:
        facts.check_known("family", family, families)
    listed = [
        entry
        for entry in every
        if entry.capabilities.issuperset(needs)
        and kind in (None, facts.kind(entry))
        and family in (None, entry.family)
    ]
    if not listed:
        raise ValueError("no mechanism has all that was asked for; ask for less")
    lines = [f"{'mechanism':31}{'direction':26}{'decodes':9}kind"]
    for group in families:
        of_group = [entry for entry in listed if entry.family == group]
        if of_group:
            lines += ["", group, *(_row(entry) for entry in of_group)]
    kinds = [_filled(f"{name}: {meaning}", "", "  ") for name, meaning in facts.KINDS.items()]
    return "\n".join([*lines, "", *kinds])


def page(name: str) -> str:
    """Returns all about a mechanism: idea, formula, options, capabilities, implementations.

    Raises:
      ValueError: an unknown name.
    """
    entry = facts.find(name)
    sections = {
        "": _filled(f"{facts.idea(entry)}.", "", ""),
        "Facts": "\n".join(_filled(line, "  ", "    ") for line in _facts(entry)),
        "Description": _description(entry),
        "Formula as code, for one head": _formula(entry),
        **_options(entry),
        "Capabilities": "\n".join(
            _filled(f"{each}: {meaning}", "  ", "    ")
            for each, meaning in registry.CAPABILITIES.items()
            if each in entry.capabilities
        ),
        "It lacks": "\n".join(
            _filled(f"{each}: {entry.reasons.get(each) or meaning}", "  ", "    ")
            for each, meaning in registry.CAPABILITIES.items()
            if each not in entry.capabilities
        ),
        "Implementations": "\n".join(_filled(line, "  ", "    ") for line in _rows(entry)),
        "Measured quality": "\n".join(_filled(line, "  ", "    ") for line in _results(entry)),
    }
    parts = [f"{title}\n{body}" if title else body for title, body in sections.items() if body]
    return "\n\n".join([f"{entry.name}\n{'=' * len(entry.name)}", *parts])


def _filled(text: str, indent: str, further: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(entry: Mechanism) -> str:
    decodes = "yes" if "decode" in entry.capabilities else "no"
    first = f"{entry.name:29}  {facts.directions(entry):24}  {decodes:7}  {facts.kind(entry)}"
    idea = _filled(f"{facts.idea(entry)}. Time {entry.complexity}.", "    ", "    ")
    return f"  {first}"[:WIDTH].rstrip() + f"\n{idea}"


def _facts(entry: Mechanism) -> list[str]:
    kind = facts.kind(entry)
    function = entry.function
    return [
        f"family: {entry.family}",
        f"kind: {kind}, {facts.KINDS[kind]}",
        f"direction: {facts.directions(entry)}",
        f"time: {entry.complexity}; memory: O({_power(entry.memory_exponent)})",
        f"drawbacks: {'; '.join(facts.gives_up(entry))}",
        f"paper: {entry.paper}",
        *([] if function is None else [f"function: effattn.{function.__name__}"]),
        f"layer: {entry.mixer}",
        f"source: {_module(entry)}",
    ]


def _power(exponent: float) -> str:
    return "N" if exponent == 1 else f"N^{exponent:g}"


def _module(entry: Mechanism) -> str:
    own = f"effattn.functional.{entry.name}"
    if own in sys.modules:
        return own
    return (entry.function or registry.load(entry.builder)).__module__


def _description(entry: Mechanism) -> str:
    """Docstring up to its list of arguments; formulas stay as they are."""
    text = inspect.getdoc(entry.function or registry.load(entry.builder)) or ""
    text = re.split(r"\n(?=Args:|Returns:|Raises:)", text)[0].strip()
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(p if "\n " in f"\n{p}" else _filled(p, "  ", "  ") for p in paragraphs)


def _formula(entry: Mechanism) -> str:
    """Source of the naive form, and of the functions of its file that it calls."""
    naive: Any = entry.naive
    if naive is None:
        return ""
    module = sys.modules[naive.__module__]
    function = getattr(module, naive.__name__, naive)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    helpers = [getattr(module, name, None) for name in names]
    own = [h for h in helpers if inspect.isfunction(h) and h.__module__ == module.__name__]
    try:
        sources = (inspect.getsource(each).rstrip() for each in dict.fromkeys([function, *own]))
        return "\n\n".join(sources)
    except (OSError, TypeError):  # no source file
        return ""


def _options(entry: Mechanism) -> dict[str, str]:
    """Sections on the options of the function and of the layer."""
    sections = {}
    if entry.function is not None:
        parameters = inspect.signature(entry.function).parameters
        named = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        sections[f"Options of effattn.{entry.function.__name__}"] = _listed(
            named, entry.options if entry.takes_heads else {}, entry.function, vars(options)
        )
    layer: Any = registry.load(entry.builder)
    own = entry.mixer_options() - {"args", "kwargs", "options"}
    is_class = isinstance(layer, type)
    # The metaclass of Flax's modules hides the signature of a class.
    parameters = inspect.signature(layer.__init__ if is_class else layer).parameters
    named = {n: p for n, p in parameters.items() if n in own}
    defaults = {} if entry.takes_heads else entry.options
    sections[f"Options of {entry.mixer}, beside those of every layer"] = _listed(
        named, defaults, layer, vars(importlib.import_module("effattn.nn.options"))
    )
    return sections


def _listed(
    parameters: Mapping[str, inspect.Parameter],
    defaults: Mapping[str, Any],
    documented: Any,
    groups: Mapping[str, Any],
) -> str:
    """One item for each parameter: name, default and documentation."""
    shared = {
        name: text
        for group in groups.values()
        if isinstance(group, type)
        for name, text in _described(inspect.getdoc(group) or "").items()
    }
    texts = {**shared, **_described(inspect.getdoc(documented) or "")}
    items = []
    for name, parameter in parameters.items():
        default = defaults.get(name, parameter.default)
        shown = getattr(default, "__name__", None) or repr(default)
        head = f"{name} (required)" if default is parameter.empty else f"{name} = {shown}"
        text = texts.get(name, "")
        items.append(_filled(f"{head}: {text}" if text else head, "  ", "    "))
    return "\n".join(items)


def _described(docstring: str) -> dict[str, str]:
    """Descriptions by name from the sections "Args" and "Attributes" of a docstring."""
    found = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)", docstring, re.M):
        items = re.findall(r"^  (\*{0,2}[\w, ]+): (.*(?:\n    .*)*)", section, re.M)
        for names, text in items:
            for name in names.split(", "):
                found[name.strip("*")] = " ".join(text.split())
    return found


def _rows(entry: Mechanism) -> list[str]:
    rows = [
        f"{row.implementation}: on {'any device' if row.platform == 'any' else row.platform}; "
        f"{', '.join(row.dtypes)}"
        + ("" if row.size is None else f"; head size up to {row.size}")
        + (f"; {row.others}" if row.others else "")
        for row in support(entry.name)
    ]
    return rows or ["plain JAX, on any device"]


def _results(entry: Mechanism) -> list[str]:
    found = [
        f"{each.task} ({'causal' if each.is_causal else 'bidirectional'}): {each.relative:.2f} of "
        f"the score of softmax attention ({each.source})"
        for each in quality.read()
        if each.mechanism == entry.name
    ]
    return found or ["no measured quality yet"]
