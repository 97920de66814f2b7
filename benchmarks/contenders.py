"""Contenders of the CPU benchmark, and their compilation to timed programs."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from benchmarks import machine
from benchmarks.workloads import (
    SPARSE_GLOBAL,
    SPARSE_WINDOW,
    WINDOW,
    Arrays,
    scalar_gate,
    unit,
    vector_gate,
    write_strength,
)
from effattn.patterns import longformer


class Program(NamedTuple):
    """Compiled program; the caller's arrays are NumPy or JAX arrays `(B, T, N, ...)`.

    Attributes:
      place: converts arrays to operands on the device.
      run: starts the program on operands; the device may still compute when `run` returns.
      wait: waits for the results of this call and of all earlier calls.
      fetch: converts the results, or a part of each given by an index, to NumPy arrays.
      temporary_bytes: memory without operands and results, if known.
      peak_bytes: memory with operands and results, if known.
    """

    place: Callable[[Arrays], Any]
    run: Callable[[Any], Any]
    wait: Callable[[Any], Any]
    fetch: Callable[..., Arrays]
    temporary_bytes: int | None
    peak_bytes: int | None


class Contender(NamedTuple):
    """Function that takes part in a comparison.

    Attributes:
      name: name in tables and figures.
      computes: name of the workload.
      compile: `(arrays, backward) -> Program`; with `backward`, the program includes gradients.
      package: Python package that must be installed.
    """

    name: str
    computes: str
    compile: Callable[[Arrays, bool], Program]
    package: str = "jax"

    @property
    def is_peer(self) -> bool:
        return not self.name.startswith("effattn")


def in_jax(function: Callable, **options: Any) -> Callable[[Arrays, bool], Program]:
    """Returns the `compile` of a JAX function.

    The function takes all arrays except the last, which is the gradient of its output.
    """
    attend = functools.partial(function, **options)

    def compile_program(arrays, backward):
        def with_gradients(*operands):
            *inputs, gradient = operands
            out, pull_back = jax.vjp(attend, *inputs)
            return out, *pull_back(gradient)

        program = with_gradients if backward else lambda *inputs: (attend(*inputs),)
        arguments = len(arrays) if backward else len(arrays) - 1
        compiled = jax.jit(program).lower(*arrays[:arguments]).compile()
        memory = compiled.memory_analysis()
        temporary = None if memory is None else memory.temp_size_in_bytes
        return Program(
            place=lambda arrays: jax.device_put(list(arrays[:arguments])),
            run=lambda operands: compiled(*operands),
            wait=jax.block_until_ready,
            fetch=lambda results, part=...: [np.asarray(result[part]) for result in results],
            temporary_bytes=temporary,
            peak_bytes=None
            if memory is None
            else temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes,
        )

    return compile_program


def in_torch(
    make: Callable[[int], Callable], device: str = "cpu", heads_first: bool = True
) -> Callable[[Arrays, bool], Program]:
    """Returns the `compile` of a PyTorch function, which `make` returns for a length.

    The function takes all arrays except the last, as `(B, N, T, H)` if `heads_first`.
    """

    def compile_program(arrays, backward):
        import torch

        torch.set_num_threads(machine.cores())
        attend = make(arrays[0].shape[1])

        def tensor(array):
            array = np.asarray(array)
            if array.dtype == jnp.bfloat16:  # torch cannot read it
                return torch.tensor(array.view(np.int16)).view(torch.bfloat16).to(device)
            return torch.tensor(array).to(device)

        def reorder(tensor):
            return tensor.transpose(1, 2) if heads_first else tensor

        def place(arrays):
            *inputs, gradient = (reorder(tensor(array)).contiguous() for array in arrays)
            return [*(a.requires_grad_(backward) for a in inputs), gradient]

        def run(operands):
            *inputs, gradient = operands
            with torch.set_grad_enabled(backward):
                out = attend(*inputs)
            if not backward:
                return [out]
            return [out, *torch.autograd.grad(out, inputs, gradient)]

        def wait(results):
            if device != "cpu":
                torch.cuda.synchronize()

        def fetch(results, part=...):
            parts = [reorder(result.detach())[part] for result in results]
            return [part.float().cpu().numpy() for part in parts]

        return Program(place, run, wait, fetch, None, None)

    return compile_program


def _sdpa(length, **options):
    from torch.nn.functional import scaled_dot_product_attention

    return functools.partial(scaled_dot_product_attention, **options)


def flex(
    allowed: Callable[[Any, Any], Any], length: int, device: str = "cpu", **options: Any
) -> Callable:
    """Returns compiled FlexAttention over the pairs of query and key that are allowed."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # a function is compiled for a limited number of lengths
    mask = create_block_mask(
        lambda batch, head, query, key: allowed(query, key), None, None, length, length, device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask, **options)


def _in_window(query, key):
    return (query - key <= WINDOW[0]) & (key - query <= WINDOW[1])


def tokamax(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """Returns Tokamax's attention, with the options of `tokamax.dot_product_attention`."""
    # Otherwise Tokamax reads its flags from the command line of the benchmark.
    importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
    return importlib.import_module("tokamax").dot_product_attention(query, key, value, **options)


def _softmax_peers(computes: str, **options: Any) -> tuple[Contender, ...]:
    """Returns the peers that take the arguments of `jax.nn.dot_product_attention`."""
    return (
        Contender("jax.nn", computes, in_jax(jax.nn.dot_product_attention, **options)),
        Contender(
            "Tokamax xla_chunked",
            computes,
            in_jax(tokamax, implementation="xla_chunked", **options),
            "tokamax",
        ),
    )


_exact = effattn.dot_product_attention
_causal_sdpa = functools.partial(_sdpa, is_causal=True)


def _scalar_gate(query, key, value, **options):
    gate = scalar_gate(key)
    return effattn.gated_linear_attention(query, key, value, log_decay=gate, **options)


def _vector_gate(query, key, value, **options):
    gate = vector_gate(key)
    return effattn.gated_linear_attention(query, key, value, log_decay=gate, **options)


def _delta(query, key, value, **options):
    beta = write_strength(key)
    return effattn.delta_rule_attention(query, unit(key), value, beta=beta, **options)


def _gated_delta(query, key, value, **options):
    beta, gate = write_strength(key), scalar_gate(key)
    return effattn.delta_rule_attention(
        query, unit(key), value, beta=beta, log_decay=gate, **options
    )


def _chunked(name: str, *of_key: Callable, normalized: bool = False):
    """Returns the `compile` of a chunked form of jax-linear-attention."""

    def attend(query, key, value):
        function = getattr(importlib.import_module("jla.ops.chunked"), name)
        k = unit(key) if normalized else key
        return function(query, k, value, *(make(key) for make in of_key))[0]

    return in_jax(attend)


def _recurrences(computes: str, ours: Callable, peer: tuple | None = None):
    """Returns a recurrence by default, in XLA and in a peer, and exact causal attention."""
    theirs = (
        ()
        if peer is None
        else (
            Contender(
                "jax-linear-attention",
                computes,
                _chunked(*peer, normalized="delta" in peer[0]),
                "jla",
            ),
        )
    )
    return (
        Contender("effattn", computes, in_jax(ours)),
        Contender("effattn, XLA", computes, in_jax(ours, implementation="xla")),
        *theirs,
        Contender("effattn, exact", "causal", in_jax(_exact, is_causal=True)),
        Contender("PyTorch SDPA", "causal", in_torch(_causal_sdpa), "torch"),
    )


# Contenders that are timed together, interleaved. Ratios are to the first contender.
COMPARISONS: dict[str, tuple[Contender, ...]] = {
    "causal": (
        Contender("effattn", "causal", in_jax(_exact, is_causal=True)),
        Contender("effattn, XLA", "causal", in_jax(_exact, is_causal=True, implementation="xla")),
        *_softmax_peers("causal", is_causal=True),
        Contender("PyTorch SDPA", "causal", in_torch(_causal_sdpa), "torch"),
    ),
    "bidirectional": (
        Contender("effattn", "bidirectional", in_jax(_exact)),
        Contender("effattn, XLA", "bidirectional", in_jax(_exact, implementation="xla")),
        *_softmax_peers("bidirectional"),
        Contender("PyTorch SDPA", "bidirectional", in_torch(_sdpa), "torch"),
    ),
    "window": (
        Contender(
            "effattn",
            "window",
            in_jax(effattn.sliding_window_attention, local_window_size=WINDOW),
        ),
        Contender(
            "effattn, XLA",
            "window",
            in_jax(
                effattn.sliding_window_attention, local_window_size=WINDOW, implementation="xla"
            ),
        ),
        *_softmax_peers("window", local_window_size=WINDOW),
        Contender(
            "PyTorch FlexAttention",
            "window",
            in_torch(functools.partial(flex, _in_window)),
            "torch",
        ),
    ),
    "sparse": (
        Contender(
            "effattn",
            "sparse",
            in_jax(effattn.sparse_attention, pattern=longformer(SPARSE_WINDOW, SPARSE_GLOBAL)),
        ),
        Contender("effattn, exact", "bidirectional", in_jax(_exact)),
    ),
    "linear": (
        Contender("effattn", "linear", in_jax(effattn.linear_attention, is_causal=True)),
        Contender(
            "effattn, XLA",
            "linear",
            in_jax(effattn.linear_attention, is_causal=True, implementation="xla"),
        ),
        Contender("effattn, exact", "causal", in_jax(_exact, is_causal=True)),
        Contender("PyTorch SDPA", "causal", in_torch(_causal_sdpa), "torch"),
    ),
    "retention": _recurrences("retention", effattn.retention),
    "scalar gate": _recurrences("scalar gate", _scalar_gate, ("simple_gla", scalar_gate)),
    "vector gate": _recurrences("vector gate", _vector_gate, ("gla", vector_gate)),
    "delta rule": _recurrences("delta rule", _delta, ("delta_rule", write_strength)),
    "gated delta rule": _recurrences(
        "gated delta rule", _gated_delta, ("gated_delta_rule", scalar_gate, write_strength)
    ),
}
