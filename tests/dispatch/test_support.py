"""The table of `effattn.support` against calls that name an implementation."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import effattn
from effattn import dispatch, options, registry
from tests.marks import slow, slow_but_for

DTYPES = "float32", "bfloat16", "float16", "float64"
MISSING = "cuDNN is not detected", "needs the package triton"


class Shape(NamedTuple):
    """Sizes of several tiles, blocks and windows; a block holds whole tiles of every kernel."""

    rows: int
    length: int
    heads: int
    size: int
    block: int
    window: int
    most_global: int


TABLES = Shape(1, 1024, 2, 64, 128, 127, 16)
OTHER = Shape(2, 1100, 4, 32, 256, 63, 5)

DENSE_SYNTHESIZERS = "synthesizer", "synthesizer_factorized_random", "synthesizer_mixture"
FIRST = ["softmax", "linear", "nystrom", "hierarchical", "synthesizer"]
ALL = slow_but_for(FIRST, registry.names())


def call_mixer(name, shape, dtype, plain=False, **options):
    """Call of a mixer, with a window and global tokens where it takes them, unless `plain`."""
    entry = registry.get(name)
    known = entry.mixer_options() | entry.options.keys()
    is_causal = options.setdefault("is_causal", "causal" in entry.capabilities)
    if not entry.mixer_takes("is_causal"):
        del options["is_causal"]
    if "max_length" in known:
        options["max_length"] = shape.length
    if "block_size" in known:
        options["block_size"] = shape.block
    if "local_window_size" in known and is_causal and (name != "based" or not plain):
        options["local_window_size"] = shape.window
    keywords = {}
    if "max_global" in known and not plain:
        options["max_global"] = shape.most_global
        first = jnp.arange(shape.length) < shape.most_global
        keywords["global_mask"] = jnp.broadcast_to(first, (shape.rows, shape.length))
    features = shape.heads * shape.size
    mixer = entry.build(features, shape.heads, dtype=dtype, rngs=nnx.Rngs(0), **options)
    return mixer(jnp.zeros((shape.rows, shape.length, features), dtype), **keywords)


def call_synthesizer(name, shape, dtype, **options):
    """Call of a Synthesizer; the mixture has twice as many hidden numbers as values."""
    value = jnp.zeros((shape.rows, shape.length, shape.heads, shape.size), dtype)
    hidden = jnp.concatenate([value, value], -1) if name == "synthesizer_mixture" else value
    return effattn.synthesizer_attention(hidden, hidden[0], value, is_causal=True, **options)


def call_paged(shape, dtype, **options):
    pages = shape.length // shape.block
    pool = jnp.zeros((shape.rows * pages, shape.block, shape.heads, shape.size), dtype)
    return effattn.paged_attention(
        jnp.zeros((shape.rows, 1, shape.heads, shape.size), dtype),
        pool,
        pool,
        block_table=jnp.arange(shape.rows * pages).reshape(shape.rows, pages),
        lengths=jnp.full(shape.rows, pages * shape.block),
        **options,
    )


def refusal(name, shape, dtype, **options):
    """The error message of a call that is refused when it is traced, or None.

    None too if it is refused for want of a package: the table lists what the package would run.
    """
    if name in DENSE_SYNTHESIZERS:
        call = functools.partial(call_synthesizer, name)
    elif name == "paged_attention":
        call = call_paged
    else:
        call = functools.partial(call_mixer, name)
    with jax.enable_x64(dtype == "float64"), dispatch.interpreted():
        try:
            jax.eval_shape(lambda: call(shape, jnp.dtype(dtype), **options))
        except NotImplementedError as error:
            if not any(missing in str(error) for missing in MISSING):
                return str(error)
    return None


def takes_implementation(name):
    try:
        refusal(name, TABLES, "float32", implementation="xla")
    except ValueError as error:
        assert "implementation" in str(error)
        return False
    return True


@pytest.mark.parametrize("shape", [TABLES, slow(OTHER)], ids=["the table's shape", "another shape"])
@pytest.mark.parametrize("name", [*ALL, "paged_attention"])
def test_a_call_is_taken_where_the_table_has_a_row_and_refused_elsewhere(name, shape):
    if name == "performer":  # the number of its features, and who takes them, follow the head size
        shape = shape._replace(size=TABLES.size)
    listed = {row.implementation: row.dtypes for row in effattn.support(name)}
    assert takes_implementation(name) == bool(listed)
    if not listed:
        return
    for implementation in dispatch.PLATFORMS:
        for dtype in DTYPES:
            reason = refusal(name, shape, dtype, implementation=implementation)
            is_listed = dtype in listed.get(implementation, ())
            assert (reason is None) == is_listed, (implementation, dtype, reason)


def test_kernels_whose_package_is_missing_are_listed_but_do_not_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = effattn.dispatch.support._rows.__wrapped__("paged_attention")
    assert "jax_triton" in {row.implementation for row in rows}
    with dispatch.interpreted(), pytest.raises(NotImplementedError, match=MISSING[1]):
        call_paged(TABLES, jnp.bfloat16, implementation="jax_triton")


@pytest.mark.parametrize("name", ["linear", "softmax", "performer", "based"])
def test_a_row_says_where_only_causal_calls_are_taken(name):
    for row in effattn.support(name):
        if row.implementation not in ("xla", "cudnn"):
            call = {"implementation": row.implementation, "is_causal": False}
            reason = refusal(name, TABLES, row.dtypes[0], **call)
            assert (reason is not None) == ("causal calls" in says(row) or "causal or" in says(row))


def says(row):
    return row.others.rpartition("; ")[-1]


def test_a_kernel_that_takes_one_segment_but_not_several_has_no_row(
    name="hierarchical", implementation="llvm"
):
    """A single segment of a hierarchy is exact attention."""
    one = TABLES._replace(length=60)
    assert refusal(name, one, "float32", implementation=implementation) is None
    assert refusal(name, TABLES, "float32", implementation=implementation) is not None
    assert implementation not in {row.implementation for row in effattn.support(name)}


@pytest.mark.parametrize("name", ALL)
def test_what_has_implementations_points_to_their_list(name):
    function = registry.get(name).function
    if effattn.support(name) and function is not None:
        assert "implementation" in inspect.signature(function).parameters
        assert "`effattn.options" in function.__doc__ or "`effattn.support(" in function.__doc__
    assert "`effattn.support(name)`" in options.Implementation.__doc__


def test_options_that_a_docstring_says_are_taken():
    call = {"implementation": "pallas", "num_levels": 1}
    assert refusal("hierarchical", TABLES, "float32", **call) is None
    for name, of in (("based", "linear"), ("longformer", "sliding_window")):
        for row in effattn.support(of):
            if row.implementation != "xla":
                options = {"implementation": row.implementation, "plain": True}
                assert refusal(name, TABLES, row.dtypes[0], **options) is None


def test_nystrom_computes_in_float32_and_so_has_only_kernels_for_that():
    listed = {row.implementation: row.dtypes for row in effattn.support("nystrom")}
    assert "mosaic_gpu" not in listed
    assert listed["mosaic_tpu"] == ("float32", "bfloat16", "float16")


def test_it_prints_a_table_and_names_what_it_does_not_know():
    table = str(effattn.support("softmax"))
    assert "| `softmax` | `triton` | cuda | float32, bfloat16, float16 | up to 256 |" in table
    with pytest.raises(ValueError, match="unknown mechanism 'sofmax'"):
        effattn.support("sofmax")


def test_calls_before_do_not_change_the_table():
    """JAX may keep the trace of an earlier call, and then does not trace the call again."""
    effattn.dispatch.support._rows.cache_clear()
    refusal("nystrom", TABLES, "float32", implementation="xla")
    first = effattn.support("nystrom")
    effattn.dispatch.support._rows.cache_clear()
    assert effattn.support("nystrom") == first


CONFIGURED = {
    "x64": lambda: jax.enable_x64(True),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("data",))),
    "interpreted": dispatch.interpreted,
}


@pytest.mark.parametrize("configured", CONFIGURED.values(), ids=CONFIGURED)
def test_the_table_is_the_same_however_jax_is_configured(configured):
    expected = effattn.support("bigbird")
    effattn.dispatch.support._rows.cache_clear()
    with configured():
        assert effattn.support("bigbird") == expected


@pytest.mark.slow
def test_all_mechanisms_that_take_an_implementation_are_in_the_table():
    listed = {row.mechanism for row in effattn.support()}
    assert listed - {"paged_attention"} == set(filter(takes_implementation, registry.names()))
