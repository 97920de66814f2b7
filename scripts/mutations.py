"""Mutation tests: small wrong changes to the library, each of which the tests must catch.

    python scripts/mutations.py --jobs 2
    python scripts/mutations.py --only 'nystrom|ring'

`mutations.toml` beside this file lists the mutations: a file, a text that occurs exactly once in
the file, the replacement, and a description of the error. Mutations are made one at a time, in a
copy of the repository. These rules select the tests to run:

- `effattn/functional/<name>.py`: `tests/functional/test_<name>*.py`, then the laws of the
  mechanisms whose functions the file holds.
- `effattn/nn/<name>.py`: `tests/nn/test_<name>*.py`, then the laws of the mechanisms whose mixers
  the file holds.
- `effattn/decode/<name>.py`: the laws of the mechanisms that the file decodes, then `tests/decode`.
- Files that several mechanisms share, such as `effattn/llvm/*`: see `RULES`, which come first.

The tests run as in `make test`, with those of `tests/slow.txt`, and stop at the first failure. The
failed test must pass again without the mutation. The result is a Markdown table on standard output.
The exit status is 1 if a mutation survives or does not apply.
"""

import argparse
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = pathlib.Path(__file__).with_suffix(".toml")

# One run of pytest: paths, and the expression for `-k`, or None.
Run = tuple[tuple[str, ...], str | None]

# Tests of files that several mechanisms share. Keys are regular expressions of paths in `effattn`.
RULES: dict[str, tuple[Run, ...]] = {
    r"xla/block_rows": ((("tests/laws",), "stick_breaking or entmax"),),
    r"xla/path_attention": ((("tests/laws",), "path"), (("tests/functional/test_path.py",), None)),
    r"cores/by_head": ((("tests/laws",), "log_linear or ttt_linear or titans"),),
    r"xla/fenwick_states": (
        (("tests/functional/test_log_linear.py",), None),
        (("tests/laws",), "log_linear"),
    ),
    r"xla/conjugate_gradients": ((("tests/functional/test_mesa.py",), None),),
    r"xla/inner_descent": (
        (("tests/functional/test_ttt_linear.py", "tests/functional/test_titans.py"), None),
        (("tests/laws",), "ttt_linear or titans"),
    ),
    r"(cores|xla|interfaces)/(block_\w+|tiling|walks)": (
        (("tests/xla/test_block_attention.py", "tests/xla/test_walks.py"), None),
        (("tests/functional/test_softmax.py",), None),
        (("tests/laws",), "softmax or sliding_window or bigbird"),
    ),
    r"(cores|interfaces|xla)/linear_(recurrence|sum)|cores/documents|xla/recurrent_\w+": (
        (("tests/xla/test_linear_recurrence.py", "tests/cores/test_recurrence.py"), None),
        (("tests/laws",), "linear or rwkv6 or gated_delta_net or performer"),
    ),
    r"xla/diagonal_recurrence": (
        (("tests/functional/test_mamba.py",), None),
        (("tests/laws",), "mamba"),
    ),
    r"(xla|llvm)/cell\w*": (
        (("tests/llvm/test_cell_recurrence.py", "tests/nn/test_slstm.py"), None),
        (("tests/functional/test_token_mixing.py",), None),
    ),
    r"xla/linear_scan": (
        (("tests/xla/test_linear_scan.py",), None),
        (("tests/laws",), "rwkv4 or s4d or aft_simple"),
    ),
    r"cores/(weighted_sums|token_mixing)": (
        (("tests/functional/test_token_mixing.py",), None),
        (("tests/laws",), "rwkv4 or aft_simple"),
    ),
    r"xla/long_convolution": (
        (("tests/functional/test_long_convolution.py",), None),
        (("tests/laws",), "hyena or s4"),
    ),
    r"xla/paged_attention": ((("tests/functional/test_paged.py",), None),),
    r"llvm/native_sparse\w*": ((("tests/llvm/test_native_sparse.py",), None),),
    r"llvm/(key_choice|chosen_key)\w*": ((("tests/llvm/test_chosen_keys.py",), None),),
    r"llvm/.*": (
        (("tests/llvm",), None),
        (("tests/laws",), "softmax or sliding_window or linear or cosformer"),
    ),
    r"arrays/dropout": (
        (("tests/arrays/test_dropout.py",), None),
        (("tests/laws",), "softmax or sliding_window"),
    ),
    r"arrays/segments": (
        (("tests/arrays/test_segments.py",), None),
        (("tests/laws",), "softmax or linear or mamba or lsh"),
    ),
    r"cores/(attention|folding|score_mod)|arrays/combine": (
        (("tests/arrays/test_combine.py", "tests/functional/test_softmax.py"), None),
        (("tests/laws",), "softmax or sliding_window or longformer or hierarchical"),
    ),
    r"cores/(segment_means|document_landmarks)": (
        (("tests/functional/test_nystrom.py",), None),
        (("tests/laws",), "nystrom"),
    ),
    r"cores/(pooling|hierarchy|packed_hierarchy)": (
        (("tests/functional/test_hierarchical.py",), None),
        (("tests/laws",), "hierarchical"),
    ),
    r"cores/document_slots": (
        (("tests/cores/test_document_slots.py",), None),
        (("tests/laws/test_laws.py",), "linformer or long_short"),
    ),
    r"cores/sorted_\w+": (
        (("tests/functional/test_lsh.py",), None),
        (("tests/laws",), "lsh"),
    ),
    r"cores/feature_maps": (
        (("tests/cores/test_feature_maps.py",), None),
        (("tests/laws",), "linear or based"),
    ),
    r"cores/(feature_attention|recurrence)": (
        (("tests/functional/test_linear.py", "tests/cores/test_recurrence.py"), None),
        (("tests/laws",), "linear or performer or retention"),
    ),
    r"nn/(attention|tokens)": (
        (("tests/nn/test_attention.py",), None),
        (("tests/laws",), "softmax or lsh or recurrent_memory or gru"),
    ),
    r"nn/(rotary|alibi|short_convolution)": (
        (("tests/nn/test_rotary.py", "tests/nn/test_alibi.py"), None),
        (("tests/nn/test_short_convolution.py",), None),
        (("tests/laws",), "mamba or lsh"),
    ),
    r"arrays/checks": (
        (("tests/arrays/test_segments.py", "tests/test_bad_input.py"), None),
        (("tests/laws/test_default.py",), "softmax or linear"),
    ),
    r"cores/chosen_keys": (
        (("tests/functional/test_indexed.py", "tests/llvm/test_chosen_keys.py"), None),
    ),
    r"cores/chosen_blocks": (
        (("tests/cores/test_chosen_blocks.py", "tests/functional/test_moba.py"), None),
        (("tests/laws/test_laws.py",), "moba"),
    ),
    r"cores/compressive_memory": (
        (("tests/functional/test_infini.py",), None),
        (("tests/laws/test_laws.py",), "infini"),
    ),
    r"cores/relative_segments": (
        (("tests/nn/test_transformer_xl.py",), None),
        (("tests/nn/test_compressive.py",), None),
        (("tests/laws/test_laws.py",), "transformer_xl or compressive"),
    ),
    r"cores/(diagonal_spaces|chunk_attention)": (
        (("tests/nn/test_mega.py",), None),
        (("tests/laws/test_laws.py",), "mega or s4d"),
    ),
    r"cores/(packed_)?native_sparse": (
        (("tests/functional/test_native_sparse.py",), None),
        (("tests/laws/test_laws.py",), "native_sparse"),
    ),
    r"(cores|nn)/experts": ((("tests/cores/test_experts.py", "tests/nn/test_experts.py"), None),),
    r"arrays/angles": ((("tests/arrays/test_angles.py",), None),),
    r"arrays/norms": ((("tests/nn/test_routing.py", "tests/functional/test_routing.py"), None),),
    r"nn/options": ((("tests/nn/test_options.py",), None),),
    r"decode/state": ((("tests/decode",), None),),
    r"decode/rewind": ((("tests/decode/test_rewind.py",), None),),
    r"nn/token_shift": ((("tests/nn/test_rwkv.py", "tests/nn/test_rwkv4.py"), None),),
    r"decode/(generate|sampling)": ((("tests/decode/test_generate.py",), None),),
    r"decode/longformer": (
        (("tests/nn/test_longformer.py", "tests/decode"), None),
        (("tests/laws/test_laws.py",), "longformer"),
    ),
    r"decode/(gathered|segments)": (
        (("tests/decode",), None),
        (("tests/laws/test_laws.py",), "bigbird or hierarchical or long_short"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Wrong change to a file; `breaks` describes the error."""

    name: str
    file: str
    before: str
    after: str
    breaks: str

    def mutated(self, root: pathlib.Path) -> str:
        """Returns the text of the file after the change.

        Raises:
          ValueError: the text to replace does not occur exactly once.
        """
        text = (root / self.file).read_text() if (root / self.file).exists() else ""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"its text occurs {count} times in {self.file}, not once")
        return text.replace(self.before, self.after)


def read(table: pathlib.Path = TABLE) -> list[Mutation]:
    """Returns all mutations of a table."""
    with table.open("rb") as file:
        return [Mutation(name, **entry) for name, entry in tomllib.load(file).items()]


def mechanisms_of(file: str) -> list[str]:
    """Returns the mechanisms whose function, mixer or decoder is in a file of the library."""
    sys.path[:0] = [str(ROOT)]
    from effattn import registry  # imported on use: most of the script needs no library

    module = file.removesuffix(".py").replace("/", ".")
    found = []
    for name in registry.names():
        entry = registry.get(name)
        functions = [] if entry.function is None else [entry.function.__module__]
        named = [part.split(":")[0] for part in (entry.builder, entry.decoder) if part]
        if module in functions + named:
            found.append(name)
    return found


def runs_of(file: str, root: pathlib.Path = ROOT) -> list[Run]:
    """Returns the runs of pytest for a file of the library, the quickest first."""
    below = file.removeprefix("effattn/")
    for pattern, runs in RULES.items():
        if re.fullmatch(pattern, below.removesuffix(".py")):
            return list(runs)
    package, _, name = below.removesuffix(".py").partition("/")
    mechanisms = " or ".join(mechanisms_of(file))
    own = sorted(str(p.relative_to(root)) for p in root.glob(f"tests/{package}/test_{name}*.py"))
    runs: list[Run] = [(tuple(own), None)] if own else []
    if mechanisms:
        laws = "tests/laws/test_laws.py" if package == "decode" else "tests/laws"
        runs.append(((laws,), mechanisms))
    if package == "decode":
        runs.append((("tests/decode",), None))
    if not runs:
        raise ValueError(f"no rule says which tests concern {file}; add one to RULES")
    return runs


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict on a mutation; `caught` names the test that failed, or is None."""

    mutation: Mutation
    caught: str | None = None
    error: str | None = None

    def row(self) -> str:
        """Returns the row of the Markdown table."""
        result = self.error or (f"`{self.caught}`" if self.caught else "**SURVIVED**")
        return (
            f"| {self.mutation.name} | `{self.mutation.file}` | {self.mutation.breaks} | {result} |"
        )


def copy_of(root: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """Copies the files that git has, or would add, in their present state; returns the folder."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)
    return to


def test(root: pathlib.Path, arguments: Sequence[str], seconds: float) -> tuple[int, str]:
    """Runs pytest in a copy; returns exit status and output."""
    # Bytecode caches compare times in seconds: a second change within a second would be missed.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "-p",
        "no:tests.slow",
        "-p",
        "no:cacheprovider",
    ]
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {seconds:.0f} s"
    return done.returncode, done.stdout


def catcher(status: int, output: str) -> tuple[str, bool]:
    """Returns the test that caught a mutation, and whether it can be run again by itself."""
    found = re.search(r"^(FAILED|ERROR) (.*?)( - .*)?$", output, re.MULTILINE)
    if found:
        return found[2], "::" in found[2]
    last = (output.strip().splitlines() or ["nothing was printed"])[-1]
    return f"exit status {status}: {last}", False


def judge(mutation: Mutation, root: pathlib.Path, runs: Sequence[Run], seconds: float) -> Verdict:
    """Makes a mutation in a copy, runs the tests, and undoes the mutation."""
    path = root / mutation.file
    try:
        text = mutation.mutated(root)
    except ValueError as error:
        return Verdict(mutation, error=f"DOES NOT APPLY: {error}")
    original = path.read_text()
    caught, alone = None, False
    path.write_text(text)
    try:
        for paths, selected in runs:
            arguments = [*paths, *(["-k", selected] if selected else [])]
            status, output = test(root, arguments, seconds)
            if status == 5:
                return Verdict(mutation, error=f"NO TESTS: pytest {' '.join(arguments)}")
            if status:
                caught, alone = catcher(status, output)
                break
    finally:
        path.write_text(original)
    if caught and alone and test(root, [caught], seconds)[0]:
        return Verdict(mutation, error=f"FAILS ANYWAY: `{caught}`")
    return Verdict(mutation, caught)


def judge_all(mutations: Sequence[Mutation], jobs: int, seconds: float) -> Iterator[Verdict]:
    """Yields the verdicts in the order of the table; each worker has its own copy."""
    with tempfile.TemporaryDirectory(prefix="effattn-mutations-") as folder:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for n in range(jobs):
            copies.put(copy_of(ROOT, pathlib.Path(folder) / str(n)))

        def one(mutation: Mutation) -> Verdict:
            root = copies.get()
            try:
                return judge(mutation, root, runs_of(mutation.file), seconds)
            finally:
                copies.put(root)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, mutations)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns exit status 1 unless each mutation was caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression for names or files")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of workers, about a gigabyte each"
    )
    parser.add_argument(
        "--seconds", type=float, default=1200, help="time limit of one run of pytest"
    )
    options = parser.parse_args(arguments)
    mutations = [m for m in read() if re.search(options.only, f"{m.name} {m.file}")]
    print("| mutation | file | what it breaks | caught by |\n| --- | --- | --- | --- |", flush=True)
    verdicts = []
    for verdict in judge_all(mutations, options.jobs, options.seconds):
        print(verdict.row(), flush=True)
        verdicts.append(verdict)
    caught = sum(verdict.caught is not None for verdict in verdicts)
    print(f"\n{caught} of {len(verdicts)} mutations were caught.")
    return 0 if verdicts and caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
