"""Command line: lists mechanisms, shows one, advises which to use, checks kernels, plans meshes.

python -m effattn list --causal --decode
python -m effattn show bigbird
python -m effattn advise --length 16384 --causal --decode
python -m effattn check --json kernels.json
python -m effattn plan --model 7B --context 8192 --batch 64 --devices 64 --hardware h100
"""

import argparse
import contextlib
import os
import sys
import zipfile
from collections.abc import Sequence

from effattn.advice import facts, pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status.

    It is 0, 1 if a check failed, or 2 for an error in the arguments.
    """
    given = _parser().parse_args(arguments)
    try:
        with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
            print(given.run(given), flush=True)
            return given.status
    except (ValueError, OSError) as error:
        print(f"python -m effattn: {error}", file=sys.stderr)
        return 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return 1


def _list(given: argparse.Namespace) -> str:
    needs = [name for name in ("causal", "bidirectional", "decode") if getattr(given, name)]
    kind = facts.EXACT if given.exact else None
    return pages.catalogue((*needs, *given.needs), kind, given.family)


def _show(given: argparse.Namespace) -> str:
    return pages.page(given.name)


def _advise(given: argparse.Namespace) -> str:
    from effattn.advice.ranking import advise  # imports Flax, which the other commands may not need

    if given.decode and not given.causal:
        raise ValueError("--decode needs --causal")
    return str(
        advise(
            given.length,
            causal=given.causal,
            decode=given.decode,
            exact=True if given.exact else None,
            needs=given.needs,
            heads=given.heads,
            head_dim=given.head_dim,
            device=given.device,
            measure=given.measure,
            sample=None if given.sample is None else _arrays(given.sample),
            mechanisms=given.mechanisms,
        )
    )


def _check(given: argparse.Namespace) -> str:
    from effattn.analysis import kernels  # imports JAX, which --help need not wait for

    names = None if given.implementations is None else tuple(given.implementations)
    rows, shown = [], False
    for row in kernels.compare(names):
        rows.append(row)
        if line := str(row):
            # At once: on a GPU all rows take minutes.
            print(*([] if shown else kernels.heading()), line, sep="\n", flush=True)
            shown = True
    found = kernels.Checked(kernels.device_kind(), tuple(rows))
    given.status = 0 if found.passed else 1
    if given.json is not None:
        with open(given.json, "w", encoding="utf-8") as file:
            file.write(found.to_json() + "\n")
    return f"\n{found.verdict}" if shown else found.verdict


def _plan(given: argparse.Namespace) -> str:
    from effattn.analysis import planning  # imports Flax, as advise does

    if given.model not in planning.MODELS:
        known = ", ".join(planning.MODELS)
        raise ValueError(f"--model must be one of {known}, got {given.model!r}")
    options = {"batch": given.batch, "precision": given.precision, "remat": not given.no_remat}
    sizes = planning.MODELS[given.model], given.mechanism, given.context
    if given.mesh is None:
        if given.devices is None or given.decode or given.microbatches != 1:
            raise ValueError("give --mesh, or --devices without --decode and --microbatches")
        return str(planning.best_mesh(*sizes, given.devices, given.hardware, **options))
    if given.devices is not None:
        raise ValueError("--mesh has its number of devices; leave --devices out")
    return str(
        planning.plan(
            *sizes,
            _sizes(given.mesh),
            given.hardware,
            microbatches=given.microbatches,
            training=not given.decode,
            **options,
        )
    )


def _sizes(mesh: str) -> dict[str, int]:
    """Sizes of a mesh, such as "fsdp=8,tensor=4"."""
    pairs = [part.partition("=") for part in mesh.split(",")]
    sizes = {axis.strip(): size for axis, _, size in pairs}
    if len(sizes) < len(pairs) or not all(size.isdecimal() for size in sizes.values()):
        raise ValueError(
            f"--mesh must be axes and sizes, such as fsdp=8,tensor=4, each axis once, got {mesh!r}"
        )
    return {axis: int(size) for axis, size in sizes.items()}


def _arrays(path: str) -> tuple:
    import numpy as np

    names = "query", "key", "value"
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            return tuple(file[name] for name in names)
    except (KeyError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise ValueError(
            f"--sample must be an .npz file with the arrays {', '.join(names)}, got {path!r}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m effattn",
        description="Lists the mechanisms of effattn, shows one, advises which to use, checks the "
        "kernels of this device, and plans models on many devices.",
    )
    parser.set_defaults(status=0)
    commands = parser.add_subparsers(required=True, metavar="list | show | advise | check | plan")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--decode", action="store_true", help="only mechanisms that decode")
    shared.add_argument(
        "--exact",
        action="store_true",
        help="only the family exact, which compares all pairs of tokens",
    )
    shared.add_argument(
        "--needs",
        nargs="+",
        default=[],
        metavar="CAPABILITY",
        help="only mechanisms with these capabilities, such as segments or dropout",
    )

    listing = commands.add_parser("list", parents=[shared], help="list the mechanisms by family")
    for name in "causal", "bidirectional":
        only = f"only mechanisms that can be {name}"
        listing.add_argument(f"--{name}", action="store_true", help=only)
    listing.add_argument("--family", help="only this family, such as sparse")
    listing.set_defaults(run=_list)

    showing = commands.add_parser("show", help="show the formula, options and devices of one")
    showing.add_argument("name", help="name of the mechanism")
    showing.set_defaults(run=_show)

    ranks = "rank the mechanisms by cost and quality"
    advising = commands.add_parser("advise", parents=[shared], help=ranks)
    direction = advising.add_mutually_exclusive_group(required=True)
    direction.add_argument("--causal", action="store_true", help="tokens read no later tokens")
    direction.add_argument("--bidirectional", action="store_true", help="tokens read all tokens")
    advising.add_argument("--length", type=int, help="tokens of a sequence (default: the sample's)")
    advising.add_argument("--heads", type=int, default=8, help="heads of the layer (default 8)")
    advising.add_argument("--head-dim", type=int, default=64, help="size of a head (default 64)")
    advising.add_argument("--device", help="cpu, gpu or tpu, to name kernels (default: this one)")
    advising.add_argument("--measure", action="store_true", help="rank by seconds on this device")
    sample = "file .npz with query, key and value, on which errors are measured"
    advising.add_argument("--sample", metavar="FILE", help=sample)
    advising.add_argument("--mechanisms", nargs="+", metavar="NAME", help="compare only these")
    advising.set_defaults(run=_advise)

    compares = "compare the kernels of this device with float64, at shapes that compilers break"
    checking = commands.add_parser("check", help=compares)
    checking.add_argument("--json", metavar="FILE", help="also write the result to this file")
    kernels = "kernels to check (default: all of this device)"
    checking.add_argument("--implementations", nargs="+", metavar="NAME", help=kernels)
    checking.set_defaults(run=_check)

    predicts = "predict memory and time of training on many devices, on a mesh or on the best ones"
    planning = commands.add_parser("plan", help=predicts)
    planning.add_argument("--model", required=True, help="size, such as 1.3B, 7B, 70B or 175B")
    planning.add_argument("--mechanism", default="softmax", help="mechanism (default softmax)")
    planning.add_argument("--context", type=int, required=True, help="tokens of a sequence")
    planning.add_argument("--batch", type=int, default=1, help="sequences of a step (default 1)")
    planning.add_argument("--hardware", default="h100", help="accelerator (default h100)")
    planning.add_argument("--mesh", metavar="SIZES", help="mesh, such as fsdp=8,tensor=4")
    planning.add_argument("--devices", type=int, help="number of devices, to search for meshes")
    planning.add_argument("--microbatches", type=int, default=1, help="of a device (default 1)")
    planning.add_argument("--precision", default="mixed", help="mixed (default) or float32")
    planning.add_argument("--no-remat", action="store_true", help="store all activations")
    planning.add_argument("--decode", action="store_true", help="decode a token, do not train")
    planning.set_defaults(run=_plan)
    return parser


if __name__ == "__main__":
    sys.exit(main())
