"""Random values of a program: arrays, masks, lengths, ids and cotangents."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from effattn.testing import functions
from tests.random_programs.programs import MAPPED, Program


def draw_known(program: Program, rng: np.random.Generator) -> dict[str, Any]:
    """The arguments without gradient, as NumPy arrays for the reference."""
    sizes, known = program.sizes, {}
    batch, queries, keys, heads = sizes[:4]
    for name, most in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        if name in program.given:
            known[name] = np.asarray(rng.integers(0, most + 1, size=batch))
            if rng.random() < 0.3:
                known[name] = np.maximum(known[name], most - 1)
    if "segment_ids" in program.given:
        pool = draw_pool(program, rng)
        known["segment_ids"] = tuple(packing(rng, batch, n, pool) for n in (queries, keys))
        if queries == keys and rng.random() < 0.7 or not program.pair:
            known["segment_ids"] = known["segment_ids"][1:] * 2
        if not program.pair:
            known["segment_ids"] = known["segment_ids"][0]
    if "query_offset" in program.given:
        shape = batch if program.broadcast[0] else ()
        signed = program.integers["query_offset"].kind == "i"
        known["query_offset"] = np.asarray(rng.integers(-2 * signed, keys + 1, size=shape))
    if "mask" in program.given:
        shape = broadcast(program, (*batch, 1, queries, keys))
        known["mask"] = rng.random(shape) < 0.8
    if "global_mask" in program.given:
        known["global_mask"] = rng.random((*batch, queries)) < 0.1
    if "dropout_rng" in program.given:
        known["dropout_rng"] = np.asarray([0, rng.integers(2**16)], np.uint32)
    for name, dtype in program.integers.items():
        if name in known:
            known[name] = jax.tree.map(lambda x, d=dtype: np.asarray(x).astype(d), known[name])
    return known


def broadcast(program: Program, shape: tuple[int, ...]) -> tuple[int, ...]:
    ones = program.broadcast[-len(shape) :]
    return tuple(1 if one else n for one, n in zip(ones, shape, strict=True))


def draw_pool(program: Program, rng: np.random.Generator) -> np.ndarray:
    """Distinct ids, the first of which is 0: small ids, or any ids of the dtype."""
    dtype = program.integers["segment_ids"]
    if not program.wild:
        return np.arange(6).astype(dtype)
    # Without x64, JAX has no 64-bit integers, and reads a list of integers as int32.
    narrow = np.dtype(f"{dtype.kind}{min(dtype.itemsize, 4)}")
    if program.container == "list" and narrow == np.uint32:
        narrow = np.dtype(np.uint16)
    limits = np.iinfo(dtype if program.x64 else narrow)
    few = rng.integers(limits.min, limits.max, size=2, dtype=dtype)
    alike = [int(few[0]) + 2**32, 2**32, 2**31, 2**63, -1, 2**16, 2**8, int(few[0]) - 2**32]
    more = [x for x in alike if limits.min <= x <= limits.max]
    ids = {*map(int, few), *(int(x) for x in rng.permutation(np.array(more, object))[:3])} - {0}
    pool = sorted(ids)
    return np.array([0, *rng.permutation(np.array(pool, object))]).astype(dtype)


def packing(rng, batch: tuple[int, ...], length: int, pool: np.ndarray) -> np.ndarray:
    """Ids `(*B, length)` in contiguous runs."""

    def row():
        runs = int(rng.integers(1, min(len(pool), length) + 1))
        borders = np.sort(rng.choice(np.arange(1, length), size=runs - 1, replace=False))
        run = np.searchsorted(borders, np.arange(length), side="right")
        return rng.permutation(pool)[run]

    rows = [row() for _ in range(int(np.prod(batch)))]
    return np.array(rows, pool.dtype).reshape(*batch, length)


def draw_values(program: Program, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Arrays, arguments without gradient, and cotangents, all for one call."""
    subject, sizes = program.subject, program.sizes
    seed = int(rng.integers(2**31))
    arrays = functions.draw_arrays(subject, sizes, True, seed)
    if "bias" in arrays:
        shape = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        arrays["bias"] = rng.normal(size=broadcast(program, shape))
    for name in program.left_out & arrays.keys():
        del arrays[name]
    arrays = functions.to_numpy(subject.case.bounded(arrays))
    arrays = functions.cast(subject, arrays, program.dtype)
    arrays["value"] = arrays["value"].astype(program.value_dtype)
    known = draw_known(program, rng)
    cotangents = functions.cotangents_of(subject, program.extent, arrays, known, seed + 1)
    return arrays, known, cotangents


def draw_case(program: Program, rng: np.random.Generator) -> list[tuple[Any, Any, Any]]:
    """Values of one call, or of each mapped call; mapped calls share all unmapped values."""
    values = [draw_values(program, rng) for _ in range(MAPPED if program.mapped else 1)]
    first = named(values[0])
    for one in values[1:]:
        for group in one[:2]:
            group.update({k: first[k] for k in group if k not in program.mapped})
    if program.mapped and "cotangents" not in program.mapped:
        values = [(*one[:2], values[0][2]) for one in values]
    return values


def named(values) -> dict[str, Any]:
    arrays, known, cotangents = values
    return {**arrays, **known, "cotangents": cotangents}


def with_nan(program: Program, arrays: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The arrays, with NaN in all tokens that are padding."""
    batch, queries, keys = program.sizes[:3]
    ids = known.get("segment_ids", (np.ones((*batch, queries)), np.ones((*batch, keys))))
    both = ids if isinstance(ids, tuple) else (ids, ids)
    padding = {}
    by_query = {"query", *getattr(program.subject.entry.naive, "per_query", ())}
    for side, length, of_side in zip(("query", "key_value"), (queries, keys), both, strict=True):
        lengths = np.asarray(known.get(f"{side}_seq_lengths", np.full(batch, length)))
        padding[side] = (of_side == 0) | (np.arange(length) >= lengths[..., None])
    arrays = dict(arrays)
    for name in program.subject.of_tokens:
        x = np.array(arrays[name])
        x[padding["query" if name in by_query else "key_value"]] = np.nan
        arrays[name] = x
    return arrays
