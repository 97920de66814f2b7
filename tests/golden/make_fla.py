"""Makes the golden file of recurrences with flash-linear-attention (torch, on a CPU).

    python -m venv /tmp/fla && /tmp/fla/bin/pip install torch einops numpy
    /tmp/fla/bin/pip install --no-deps fla-core
    /tmp/fla/bin/python tests/golden/make_fla.py

The naive forms of the package run on small random inputs. Each naive form is in a file of its own
that needs neither Triton nor a GPU. All arrays are float32, with time second and heads third;
scores are scaled by H**-0.5. `fla.npz` holds, with B = 2, T = 11, N = 3 heads, H = 4 and Hv = 6:

    query, key      (B, T, N, H), the inputs of every case; keys have length 1
    value           (B, T, N, Hv)
    beta            (B, T, N), in (0, 1)
    log_decay       (B, T, N), one decay a token; below 0
    log_decay_feature (B, T, N, H), one decay a feature
    initial_state   (B, N, H, Hv)
    cotangent       (B, T, N, Hv), of the output
    bonus           (N, H)
    removal_key     (B, T, N, H), of length 1
    learning_rate   (B, T, N, H), in (0, 1)
    erase           (B, T, N, H), in (0, 1)
    write           (B, T, N, Hv), in (0, 1)
    later_keys      (B, T, N, 1, H), of length 1
    later_values    (B, T, N, 1, Hv)
    later_beta      (B, T, N, 1), in (0, 1)

and the cases

    linear          no decay, no normaliser
    retention       the decays 1 - 2^(-5 - n) of RetNet; from a state of zero, which is not given
    token_decay     decays `log_decay`: retention or Mamba-2 with decays of tokens
    gated_linear    decays `log_decay_feature`
    delta           `beta`
    gated_delta     `beta` and `log_decay`
    rwkv6           decays `log_decay_feature` and `bonus`, without a scale
    rwkv7           decays `log_decay_feature`, `removal_key` and `learning_rate`; the form with a
                    diagonal plus a matrix of rank one, whose scale is taken out
    kimi_delta      `beta` and decays `log_decay_feature`
    gated_delta_2   decays `log_decay_feature`, `erase` and `write`
    delta_product   two steps a token, `log_decay`
    forgetting      softmax attention whose log forget gates are `log_decay`; without a state

Each case has the results "<case>/output" and "<case>/state" (after the last token), and the
gradients of sum(output * cotangent) as "<case>/d_<input>" for the inputs that the case takes.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys

import einops
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, HEADS, SIZE, VALUE_SIZE = 2, 11, 3, 4, 6


def naive(operation: str, file: str = "naive.py"):
    """Loads the module from its file, because the package around the file asks for Triton."""
    (root,) = importlib.util.find_spec("fla").submodule_search_locations
    path = pathlib.Path(root, "ops", operation, file)
    spec = importlib.util.spec_from_file_location(f"naive_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tokens = BATCH, LENGTH, HEADS
    return {
        "query": torch.randn(*tokens, SIZE),
        "key": torch.nn.functional.normalize(torch.randn(*tokens, SIZE), dim=-1),
        "value": torch.randn(*tokens, VALUE_SIZE),
        "beta": torch.rand(*tokens),
        "log_decay": torch.nn.functional.logsigmoid(torch.randn(*tokens) + 1),
        "log_decay_feature": torch.nn.functional.logsigmoid(torch.randn(*tokens, SIZE) + 1),
        "initial_state": torch.randn(BATCH, HEADS, SIZE, VALUE_SIZE),
        "cotangent": torch.randn(*tokens, VALUE_SIZE),
        "bonus": torch.randn(HEADS, SIZE),
        "removal_key": torch.nn.functional.normalize(torch.randn(*tokens, SIZE), dim=-1),
        "learning_rate": torch.rand(*tokens, SIZE),
        "erase": torch.rand(*tokens, SIZE),
        "write": torch.rand(*tokens, VALUE_SIZE),
        "later_keys": torch.nn.functional.normalize(torch.randn(*tokens, 1, SIZE), dim=-1),
        "later_values": torch.randn(*tokens, 1, VALUE_SIZE),
        "later_beta": torch.rand(*tokens, 1),
    }


def heads_first(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in arrays)


def linear(query, key, value, initial_state):
    return naive("linear_attn").naive_recurrent_linear_attn(
        query, key, value, initial_state=initial_state, output_final_state=True
    )


def retention(query, key, value):
    """The output in the parallel form, which has no state; the state from the form with decays."""
    output = naive("retention").naive_retention(*heads_first(query, key, value)).transpose(1, 2)
    log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(HEADS)))).expand(BATCH, LENGTH, HEADS)
    again, state = token_decay(query, key, value, log_decay, None)
    torch.testing.assert_close(again, output)
    return output, state


def token_decay(query, key, value, log_decay, initial_state):
    return naive("simple_gla").naive_recurrent_simple_gla(
        query, key, value, log_decay, initial_state=initial_state, output_final_state=True
    )


def gated_linear(query, key, value, log_decay_feature, initial_state):
    return naive("gla").naive_recurrent_gla(
        query,
        key,
        value,
        log_decay_feature,
        initial_state=initial_state,
        output_final_state=True,
    )


def delta(query, key, value, beta, initial_state):
    output, state = naive("delta_rule").delta_rule_recurrence(
        *heads_first(query, key, value, beta), initial_state=initial_state
    )
    return output.transpose(1, 2), state


def gated_delta(query, key, value, beta, log_decay, initial_state):
    return naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        query, key, value, beta, log_decay, initial_state=initial_state, output_final_state=True
    )


def rwkv6(query, key, value, log_decay_feature, bonus, initial_state):
    output, state = naive("rwkv6", "recurrent_naive.py").naive_recurrent_rwkv6(
        *heads_first(query, key, value, log_decay_feature),
        bonus,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=True,
    )
    return output.transpose(1, 2), state


def rwkv7(query, key, value, log_decay_feature, removal_key, learning_rate, initial_state):
    output, state = naive("generalized_delta_rule/dplr").dplr_recurrence(
        *heads_first(
            query * SIZE**0.5,
            key,
            value,
            -removal_key,
            removal_key * learning_rate,
            log_decay_feature,
        ),
        initial_state=initial_state,
    )
    return output.transpose(1, 2), state


def kimi_delta(query, key, value, beta, log_decay_feature, initial_state):
    return naive("kda").naive_recurrent_kda(
        query,
        key,
        value,
        log_decay_feature,
        beta,
        initial_state=initial_state,
        output_final_state=True,
    )


def gated_delta_2(query, key, value, log_decay_feature, erase, write, initial_state):
    return naive("gdn2").naive_recurrent_gdn2(
        query,
        key,
        value,
        log_decay_feature,
        erase,
        write,
        initial_state=initial_state,
        output_final_state=True,
    )


def delta_product(
    query, key, value, later_keys, later_values, beta, later_beta, log_decay, initial_state
):
    def in_order(first, later):
        steps = torch.cat([first[:, :, None], later.movedim(3, 2)], 2)
        return steps.flatten(1, 2)

    return naive("gated_delta_product").naive_recurrent_gated_delta_product(
        query,
        in_order(key, later_keys),
        in_order(value, later_values),
        log_decay,
        in_order(beta, later_beta),
        scale=SIZE**-0.5,
        initial_state=initial_state,
        output_final_state=True,
        num_householder=2,
    )


def forgetting(query, key, value, log_decay):
    return naive("forgetting_attn").naive_forgetting_attn(query, key, value, log_decay), None


CASES = (
    linear,
    retention,
    token_decay,
    gated_linear,
    delta,
    gated_delta,
    rwkv6,
    rwkv7,
    kimi_delta,
    gated_delta_2,
    delta_product,
    forgetting,
)


def make(cases, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    arrays = {name: x.numpy() for name, x in inputs.items()}
    for case in cases:
        names = case.__code__.co_varnames[: case.__code__.co_argcount]
        given = {name: inputs[name].clone().requires_grad_() for name in names}
        output, state = case(**given)
        gradients = torch.autograd.grad((output * inputs["cotangent"]).sum(), [*given.values()])
        results = {f"d_{name}": x.numpy() for name, x in zip(names, gradients, strict=True)}
        results["output"] = output.detach().numpy()
        if state is not None:
            results["state"] = state.detach().numpy()
        arrays.update({f"{case.__name__}/{name}": x for name, x in results.items()})
    return arrays


def save(file: str, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(HERE / f"{file}.npz", **arrays)
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "einops": einops.__version__,
        "fla-core": importlib.metadata.version("fla-core"),
    }
    (HERE / f"{file}.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    save("fla", make(CASES, draw()))
