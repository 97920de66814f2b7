"""Command line: lists mechanisms, shows one, advises which to use, and checks kernels.

python -m effattn list --causal --decode
python -m effattn show bigbird
python -m effattn advise --length 16384 --causal --decode
python -m effattn check --json kernels.json
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from effattn.advice import facts, pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status.

    It is 0, 1 if a check failed, or 2 for an error in the arguments.
    """
    given = _parser().parse_args(arguments)
    try:
        text = given.run(given)
    except (ValueError, OSError) as error:
        print(f"python -m effattn: {error}", file=sys.stderr)
        return 2
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        print(text, flush=True)
        return given.status
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
    from effattn.analysis.kernels import check  # imports JAX, which --help need not wait for

    found = check(None if given.implementations is None else tuple(given.implementations))
    given.status = 0 if found.passed else 1
    if given.json is not None:
        with open(given.json, "w", encoding="utf-8") as file:
            file.write(found.to_json() + "\n")
    return str(found)


def _arrays(path: str) -> tuple:
    import numpy as np

    names = "query", "key", "value"
    try:
        with np.load(path) as file:
            return tuple(file[name] for name in names)
    except (KeyError, ValueError, TypeError, AttributeError, EOFError):
        raise ValueError(
            f"--sample must be an .npz file with the arrays {', '.join(names)}, got {path!r}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m effattn",
        description="Lists the mechanisms of effattn, shows one, advises which to use, and checks "
        "the kernels of this device.",
    )
    parser.set_defaults(status=0)
    commands = parser.add_subparsers(required=True, metavar="list | show | advise | check")
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
