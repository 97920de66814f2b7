"""Tuning cache: results of `effattn.tune`, used by calls with `implementation=None`.

The results are stored in one JSON file, `cache_file()`, by device, JAX version and call.
"""

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import platformdirs

if TYPE_CHECKING:
    from effattn.dispatch import Call

_FORMAT = 1

Tiles = tuple[tuple[str, tuple[int, ...]], ...]


class Choice(NamedTuple):
    """An implementation, with tuned tile sizes.

    Attributes:
      implementation: name of the implementation.
      tiles: pairs (kernel name, tile); kernels that are not listed use their default tile.
    """

    implementation: str
    tiles: Tiles = ()

    def __str__(self) -> str:
        tiles = (f"{kernel} {' x '.join(map(str, sizes))}" for kernel, sizes in self.tiles)
        return ", ".join((self.implementation, *tiles))


class Trial:
    """One trace of a program with given choices.

    Attributes:
      choices: the choice for each call, by signature.
      called: the tunable calls that were traced: by signature, the candidates and whether the call
        is differentiable.
    """

    def __init__(self, choices: Mapping[str, Choice]):
        self.choices, self.called = choices, dict[str, Any]()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Applies the choices to all that is traced within; earlier traces are not reused."""
        with _trial(self):
            yield


_trial: Any = jax.make_user_context(None)


def look_up(call: "Call") -> Choice | None:
    """The tuned choice for a call with `implementation=None`; None if it was never measured."""
    if call.signature is None:
        return None
    trial = _trial.value
    if trial is None and not measured():
        return None
    signature = call.signature()
    if trial is not None:
        trial.called[signature] = call.candidates(), call.differentiable
        return trial.choices.get(signature, Choice("xla"))
    found = measured().get((device_kind(), signature), {})
    if found and jax.__version__ not in found:
        warn_once(
            f"{signature} was tuned with jax {' and '.join(found)}, and its results are not used "
            f"with jax {jax.__version__}: call effattn.tune again"
        )
    choice = found.get(jax.__version__)
    return choice if choice is not None and _is_known(choice, call) else None


def _is_known(choice, call):
    """True if the call has the chosen implementation, kernel names and numbers of tile sizes."""
    if choice.implementation not in call.refusals:
        return False
    tried = call.tilings(choice.implementation) if choice.tiles else {}
    return all(
        any(len(tile) == len(sizes) for tile in tried.get(kernel, ()))
        for kernel, sizes in choice.tiles
    )


def rounded(count: Any) -> Any:
    """Rounds up to a power of two, so that calls of similar size share a tuning result."""
    if not isinstance(count, int):  # an exported program leaves it open
        return count
    return 1 << (count - 1).bit_length() if count > 0 else count


def device_kind() -> str:
    """Kind of the default device."""
    device = jax.config.jax_default_device
    return (device if isinstance(device, jax.Device) else jax.devices()[0]).device_kind


def folder() -> Path | None:
    """effattn's folder in the user's cache folder; None without such a folder."""
    try:
        path = platformdirs.user_cache_path("effattn")
    except (RuntimeError, OSError, KeyError):  # no home folder, as in many containers
        return None
    # Some releases of platformdirs return "~/.cache" then, which would create a folder named "~".
    return path if path.is_absolute() else None


def cache_file() -> Path | None:
    """Path of the tuning cache; None without a cache folder."""
    where = folder()
    return where and where / "tuning.json"


def save(choices: Mapping[str, Choice]) -> None:
    """Stores choices for this device and JAX version, in this process and, if possible, the file.

    A file that cannot be written is a `RuntimeWarning`.
    """
    device, version = device_kind(), jax.__version__
    known = measured()
    for signature, choice in choices.items():
        known.setdefault((device, signature), {})[version] = choice
    path = cache_file()
    try:
        if path is None:
            raise OSError("this user has no home folder: set HOME or XDG_CACHE_HOME")
        # Other processes may have written results since this one read the file.
        for key, versions in _read(path).items():
            known[key] = {**versions, **known.get(key, {})}
        write(path, json.dumps(_to_json(known), indent=1, sort_keys=True).encode())
    except OSError as error:
        warn_once(
            f"the results of effattn.tune are kept for this process alone: {path or 'their file'} "
            f"cannot be written ({error})"
        )


def write(path: Path, content: bytes) -> None:
    """Writes a file, and its folder. Other processes never read half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


Measured = dict[tuple[str, str], dict[str, Choice]]  # by device and call, then by JAX version


@functools.cache
def measured() -> Measured:
    """All known results: those read from the file, and those that this process has added."""
    path = cache_file()
    return {} if path is None else _read(path)


def _read(path: Path) -> Measured:
    """The results in a file; none if the file cannot be read, with a warning if it is damaged."""
    try:
        return _from_json(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}  # no file that this user may read
    except Exception as error:  # any invalid content
        warn_once(
            f"{path} is ignored, because effattn.tune cannot read it ({error!r}); remove it, or "
            "call effattn.tune again to replace it"
        )
        return {}


def _to_json(measured: Measured) -> dict[str, Any]:
    entries = [
        {
            "device": device,
            "call": signature,
            "jax": version,
            "implementation": choice.implementation,
            "tiles": dict(choice.tiles),
        }
        for (device, signature), versions in measured.items()
        for version, choice in versions.items()
    ]
    return {"format": _FORMAT, "measured": entries}


def _from_json(data: Any) -> Measured:
    if data["format"] != _FORMAT:
        raise ValueError(f"format must be {_FORMAT}, got {data['format']!r}")
    measured: Measured = {}
    for entry in data["measured"]:
        texts = [entry[name] for name in ("device", "call", "jax", "implementation")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"each name in an entry must be a string, got {texts}")
        device, signature, version, implementation = texts
        tiles = tuple((kernel, tuple(sizes)) for kernel, sizes in entry["tiles"].items())
        if not all(type(size) is int and size > 0 for _, sizes in tiles for size in sizes):
            raise ValueError(f"tiles must be positive ints, got {entry['tiles']}")
        choice = Choice(implementation, tiles)
        measured.setdefault((device, signature), {})[version] = choice
    return measured


@functools.cache
def warn_once(message: str) -> None:
    """Issues a `RuntimeWarning`, once for each message."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
