"""Pages of mechanisms: what the registry, the code and the measurements say, after the own text.

The text of a mechanism is `docs/mechanisms/<name>.md`: its idea, its formula, and differences from
the paper. Everything else is added to the page here when the site is built.
"""

import re
from pathlib import Path
from typing import Any

from effattn import registry
from effattn.advice import about, facts, quality
from effattn.advice.layers import Layer
from effattn.registry import Mechanism

from . import calls, measurements
from .markdown import python, table

DOCS = Path(__file__).resolve().parents[1]
FOLDER = "mechanisms/"
CODE_LENGTH = 4096


def setup(app: Any) -> dict[str, bool]:
    """Adds the generated part to each page as Sphinx reads it."""
    app.connect("source-read", _add)
    return {"parallel_read_safe": True}


def _add(app, docname, source):
    name = docname.removeprefix(FOLDER)
    if docname.startswith(FOLDER) and name in registry.names():
        source[0] = f"{source[0].rstrip()}\n\n{generated(name)}\n"
    elif docname == f"{FOLDER}index":
        source[0] = f"{source[0].rstrip()}\n\n{catalogue()}\n"


def catalogue() -> str:
    """Tables of all mechanisms by family."""
    entries = [registry.get(name) for name in registry.names()]
    parts = []
    for family in dict.fromkeys(entry.family for entry in entries):
        rows = [
            (
                f"[`{entry.name}`]({entry.name}.md)",
                facts.directions(entry),
                "yes" if "decode" in entry.capabilities else "no",
                entry.complexity,
                entry.paper,
            )
            for entry in entries
            if entry.family == family
        ]
        headings = "mechanism", "direction", "decodes", "time", "paper"
        parts += [f"## {family.capitalize()}", table(headings, rows)]
    pages = "\n".join(sorted(entry.name for entry in entries))
    toctree = f"```{{toctree}}\n:hidden:\n\n{pages}\n```"
    return "\n\n".join([*parts, toctree])


def generated(name: str) -> str:
    """The generated part of the page of a mechanism, in Markdown."""
    entry = registry.get(name)
    sections = {
        "In short": _facts(entry),
        "Picture": _picture(entry),
        "As code": _code(entry),
        "Options": _options(entry),
        "Where it runs": _implementations(entry),
        "What the tests guarantee": _capabilities(entry),
        "Measured": _measured(entry),
    }
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)


def _facts(entry: Mechanism) -> str:
    found = about.facts_of(entry)
    layer = found["layer"].rpartition(".")
    found["layer"] = f"{{py:class}}`{layer[2]} <{found['layer']}>`"
    if "function" in found:
        found["function"] = f"{{py:func}}`{found['function']}`"
    found["source"] = f"[`{found['source']}`](../../{source(entry)})"
    order = "family", "kind", "direction", "time", "memory", "drawbacks"
    order += "function", "layer", "source", "paper"
    rows = [(f"**{name}**", found[name]) for name in order if name in found]
    return table(("", ""), rows)


def source(entry: Mechanism) -> str:
    """The file that has the formula of a mechanism."""
    return f"{about.module_of(entry).replace('.', '/')}.py"


def _picture(entry: Mechanism) -> str:
    """Attention weights of a small example, which `make gallery` draws."""
    path = f"images/mechanisms/{entry.name}.png"
    if not (DOCS / path).exists():
        return ""
    return (
        f"![Attention weights by query and key](../{path})\n\nAttention weights of 64 tokens with "
        "small options; the darker, the larger. [How it is drawn](../analysis.md)."
    )


def _code(entry: Mechanism) -> str:
    parts = []
    if formula := about.formula(entry):
        parts += [_about_formula(entry, formula), python(formula)]
    if entry.function is not None:
        parts += ["The fast form, for all heads and examples:", python(calls.program(entry))]
    is_causal = "causal" in entry.capabilities
    layer = Layer(entry, {}, 8, 64, is_causal)
    code = layer.code(CODE_LENGTH, is_causal and "decode" in entry.capabilities)
    return "\n\n".join([*parts, "As a layer of a Flax model:", python(code)])


def _about_formula(entry: Mechanism, formula: str) -> str:
    form = f"`effattn.naive.{entry.name}`"
    if entry.function is None:
        lines = [f"The formula, for one example; {form} runs it on the layer below and its tokens."]
    else:
        lines = [
            "The formula, for one head or one example;",
            f"{form} runs it for all of them, with the arguments of the fast form.",
        ]
    if re.search(r"\bpairs\b", formula):
        lines.append("`pairs` are the keys that each query may attend to.")
    return " ".join(lines)


def _options(entry: Mechanism) -> str:
    """Tables of own options; those that many mechanisms share are named."""
    parts = []
    for name, listed in about.options_of(entry).items():
        of_function = name != entry.mixer
        shared = [
            o.name
            for o in listed
            if of_function and o.default is not None and about.is_shared(o.name)
        ]
        own = [o for o in listed if o.name not in shared]
        rows = [(f"`{o.name}`", _default(o), o.text) for o in own]
        kind = "func" if of_function else "class"
        lines = [f"Of {{py:{kind}}}`{name}`:"]
        if rows:
            lines.append(table(("option", "default", "meaning"), rows))
        if any(o.in_layers for o in own):
            lines.append(f"*In layers*: in layers that are made by the name `{entry.name}`.")
        if shared:
            names = ", ".join(f"`{name}`" for name in shared)
            lines.append(f"Shared [options](../api/effattn.options.rst): {names}.")
        if len(lines) > 1:
            parts.append("\n\n".join(lines))
    return "\n\n".join(parts)


def _default(option: about.Option) -> str:
    default = "required" if option.default is None else f"`{option.default}`"
    return default if option.in_layers is None else f"{default}; in layers `{option.in_layers}`"


def _implementations(entry: Mechanism) -> str:
    return "\n".join(f"- {line}" for line in about.implementations(entry))


def _capabilities(entry: Mechanism) -> str:
    known = registry.CAPABILITIES.items()
    has = [f"- {name}: {meaning}" for name, meaning in known if name in entry.capabilities]
    lacks = [
        f"- {name}: {entry.reasons.get(name) or meaning}"
        for name, meaning in known
        if name not in entry.capabilities
    ]
    parts = ["Each of these has tests that every mechanism with it must pass:", "\n".join(has)]
    if lacks:
        parts += ["It lacks, and refuses as an argument:", "\n".join(lacks)]
    return "\n\n".join(parts)


def _measured(entry: Mechanism) -> str:
    parts = []
    if rows := cost_rows(entry.name):
        headings = (
            "direction",
            "tokens",
            "forward",
            "training step",
            "memory of a step",
        )
        parts += [
            "Time of one layer as a multiple of that of exact attention, measured beside it (above "
            "1 is slower), and the memory of temporary arrays in a training step:",
            table(headings, rows),
            f"Measured on {measurements.machine(entry.name)}: "
            f"[all numbers](../report.md#{measurements.table_of(entry.name)}).",
        ]
    scores = [
        (
            f"[{each.task}](../report.md#{each.task.lower()})",
            "causal" if each.is_causal else "bidirectional",
            f"{each.score:.2f}",
            f"{each.typical:.2f}",
        )
        for each in quality.read()
        if each.mechanism == entry.name
    ]
    if scores:
        parts += [
            "Scores from 0 to 1, and those of a typical mechanism on the same tasks:",
            table(("task", "direction", "score", "typical"), scores),
        ]
    return "\n\n".join(parts)


def cost_rows(name: str) -> list[tuple[str, ...]]:
    """Rows of the table of measured costs, for each direction and length."""
    rows = []
    for layer in measurements.layers(name):
        passes = layer["passes"]
        step = passes["step"]
        if "temporary_bytes" in step:
            rows.append(
                (
                    layer["direction"],
                    f"{layer['length']:,}",
                    _times(passes["forward"]),
                    _times(step),
                    f"{step['temporary_bytes'] / 1e6:,.0f} MB",
                )
            )
    return sorted(rows, key=lambda row: row[0], reverse=True)


def _times(found):
    """Time relative to exact attention; its seconds where exact attention was not timed."""
    if (times := measurements.times(found)) is not None:
        return f"{times:.3g}"
    return f"{found['seconds']:.3g} s" if "seconds" in found else "-"
