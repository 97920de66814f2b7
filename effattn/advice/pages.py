"""Pages about mechanisms as text: the list of all, and one in detail."""

import re
import textwrap
from collections.abc import Iterable, Sequence

from effattn import registry
from effattn.advice import about, facts
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
        asked = {"capabilities": ", ".join(needs), "kind": kind, "family": family}
        words = ", ".join(f"{name} {value}" for name, value in asked.items() if value)
        raise ValueError(f"no mechanism has {words}; leave one of these out")
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
        "Facts": _lines(f"{name}: {fact}" for name, fact in about.facts_of(entry).items()),
        "Description": _description(entry),
        "Formula as code, for one head": about.formula(entry),
        **_options(entry),
        "Capabilities": _lines(
            f"{each}: {meaning}"
            for each, meaning in registry.CAPABILITIES.items()
            if each in entry.capabilities
        ),
        "It lacks": _lines(
            f"{each}: {entry.reasons.get(each) or meaning}"
            for each, meaning in registry.CAPABILITIES.items()
            if each not in entry.capabilities
        ),
        "Implementations": _lines(about.implementations(entry)),
        "Measured quality": _lines(about.results(entry)),
    }
    parts = [f"{title}\n{body}" if title else body for title, body in sections.items() if body]
    return "\n\n".join([f"{entry.name}\n{'=' * len(entry.name)}", *parts])


def _lines(items: Iterable[str]) -> str:
    """One item below the other, of which further lines are indented."""
    return "\n".join(_filled(item, "  ", "    ") for item in items)


def _filled(text: str, indent: str, further: str) -> str:
    """Wraps the text, but not within a complexity such as O(N (w + g))."""
    whole = re.sub(r"O\((?:[^()]|\([^()]*\))*\)", lambda found: found[0].replace(" ", "\xa0"), text)
    return textwrap.fill(
        whole,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\xa0", " ")


def _row(entry: Mechanism) -> str:
    decodes = "yes" if "decode" in entry.capabilities else "no"
    first = f"{entry.name:29}  {facts.directions(entry):24}  {decodes:7}  {facts.kind(entry)}"
    idea = _filled(f"{facts.idea(entry)}. Time {entry.complexity}.", "    ", "    ")
    return f"  {first}"[:WIDTH].rstrip() + f"\n{idea}"


def _options(entry: Mechanism) -> dict[str, str]:
    """Sections on the options of the function and of the layer."""
    return {
        f"Options of {name}{', beside those of every layer' * (name == entry.mixer)}": _lines(
            map(_option, listed)
        )
        for name, listed in about.options_of(entry).items()
    }


def _option(option: about.Option) -> str:
    head = f"{option.name} (required)"
    if option.default is not None:
        head = f"{option.name} = {option.default}"
    if option.in_layers is not None:
        head += f", in layers {option.in_layers}"
    return f"{head}: {option.text}" if option.text else head


def _description(entry: Mechanism) -> str:
    """Paragraphs of the docstring; formulas stay as they are."""
    paragraphs = about.description(entry)
    return "\n\n".join(p if "\n " in f"\n{p}" else _filled(p, "  ", "  ") for p in paragraphs)
