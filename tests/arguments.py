"""Arguments of mechanisms on which the laws test them, where plain normal numbers do not do."""

import jax.numpy as jnp
import numpy as np

from effattn.arrays import dtypes


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def projections(rows, length):
    """Random projections; each row for values sums to 1, so that equal values stay equal."""
    rng = np.random.default_rng(0)
    of_keys, of_values = rng.normal(size=(2, *rows, length)) / length**0.5
    of_values[..., -1] += 1 - of_values.sum(-1)
    return {"key_projection": of_keys, "value_projection": of_values}


def in_float32(arrays):
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def tokens(sizes, *size):
    return (*sizes.batch, sizes.keys, sizes.key_heads, *size)


def softplus(x):
    return np.log1p(np.exp(x))


# Random blocks for the 6 blocks of 17 tokens. Some are also in the window or global, and block 1 is
# named twice in a row.
RANDOM_BLOCKS = np.array([[3, 1], [4, -1], [0, 2], [1, 1], [0, 3], [2, 4]], np.int32)


def positive(rng, sizes):
    """Queries and keys in which every pair has enough positive entries in common.

    Otherwise the sum of the weights is nearly zero, and every form has a large error.
    """
    of_query = (*sizes.batch, sizes.queries, sizes.heads, sizes.size)
    return {
        "query": rng.uniform(-0.5, 1.5, size=of_query),
        "key": rng.uniform(-0.5, 1.5, size=tokens(sizes, sizes.size)),
    }


def after_tokens(rng, shape):
    """State of Based attention after four tokens, so that no query has weights that sum to zero."""
    *batch, width, size = shape.shape
    head_size = next(h for h in range(width) if 1 + h + h * (h + 1) // 2 == width)
    x, values = (rng.normal(size=(*batch, 4, n)) for n in (head_size, size))
    values[..., -1] = 1
    rows, columns = np.triu_indices(head_size)
    squares = x[..., rows] * x[..., columns] * np.where(rows == columns, 0.5**0.5, 1)
    features = np.concatenate([np.ones_like(x[..., :1]), x, squares], -1)
    return np.einsum("...sf,...sd->...fd", features, values)


def after_five_tokens(rng, shapes):
    """State of log-linear attention, which has sums at the levels of the bits of 5."""
    full = np.array([True, False, True, *[False] * (shapes.sums.shape[-3] - 3)])
    sums = rng.normal(size=shapes.sums.shape) * full[:, None, None]
    return type(shapes)(sums, np.full(shapes.position.shape, 5.0))


def after_keys(rng, shapes):
    """State of the mesa layer after some tokens; its matrix of keys is symmetric."""
    keys = rng.normal(size=shapes.keys.shape) / 2
    return type(shapes)(keys @ keys.swapaxes(-1, -2), rng.normal(size=shapes.values.shape))


def inner_model(rng, sizes):
    """Learning rates, and the inner model of TTT-Linear."""
    heads, features = sizes.key_heads, sizes.value_size
    scale, bias, norm_bias = rng.normal(size=(3, heads, features))
    return {
        "learning_rate": rng.uniform(0, 1, size=tokens(sizes)) / sizes.size,
        "initial_weights": rng.normal(size=(heads, sizes.size, features)),
        **{"initial_bias": bias, "norm_scale": scale, "norm_bias": norm_bias},
    }


def after_some_tokens(rng, shapes):
    """State of a memory that learns in mini-batches of 4 tokens, within the second one."""
    arrays = {n: rng.normal(size=x.shape) / 4 for n, x in shapes._asdict().items()}
    return type(shapes)(**{**arrays, "position": np.full(shapes.position.shape, 6.0)})


def bounded_rates(arrays):
    """The arrays, with rates that keep the memory bounded for any keys."""
    rate = arrays["learning_rate"] / jnp.maximum(1, (arrays["key"] ** 2).sum(-1))
    return {**arrays, "learning_rate": rate.astype(arrays["learning_rate"].dtype)}


def forget_gates(rng, sizes):
    """Log decays of a forget gate, and the keys that are tied to it."""
    log_decay = -rng.uniform(0, 1, size=tokens(sizes, sizes.size))
    return {"key": -np.expm1(log_decay), "log_decay": log_decay}


def exponential_gates(rng, sizes):
    """Logarithms of input gates and of forget gates; some forget gates are above 1."""
    return {
        "log_input_gate": rng.normal(size=tokens(sizes)),
        "log_forget_gate": rng.uniform(-1, 0.1, size=tokens(sizes)),
    }


def two_halves(rng, sizes):
    """Queries and keys of two halves, with the weight of the second softmax of each head."""
    of_query = (*sizes.batch, sizes.queries, sizes.heads, 2 * sizes.size)
    return {
        "query": rng.normal(size=of_query),
        "key": rng.normal(size=tokens(sizes, 2 * sizes.size)),
        "lambda_": rng.uniform(0.2, 0.8, size=sizes.heads),
    }


def turns(rng, sizes):
    """Step sizes, decays, shares of the present token, and angles of two pairs of features."""
    return {
        "step_size": rng.uniform(0.1, 1, size=tokens(sizes)),
        "log_decay": -rng.uniform(0, 1, size=tokens(sizes)),
        "trapezoid": rng.uniform(0, 1, size=tokens(sizes)),
        "angle": rng.normal(size=tokens(sizes, min(2, sizes.size // 2))),
    }


def strengths(rng, sizes):
    """Strengths `beta` for keys whose length is about the square root of their size."""
    return {"beta": rng.uniform(0, 1, size=tokens(sizes)) / sizes.size}


def reflections(rng, sizes):
    """Vectors and strengths of transformations."""
    strength = rng.uniform(0, 2, size=tokens(sizes)) / sizes.size
    return {"reflection": rng.normal(size=tokens(sizes, sizes.size)), "beta": strength}


def strengths_and_decays(rng, sizes):
    return {**strengths(rng, sizes), "log_decay": -rng.uniform(0, 1, size=tokens(sizes))}


def strengths_and_decays_of_features(rng, sizes):
    return {**strengths(rng, sizes), "log_decay": -rng.uniform(0, 1, tokens(sizes, sizes.size))}


def strengths_and_decays_of_steps(rng, sizes):
    given = strengths_and_decays(rng, sizes)
    return {
        **given,
        "beta": np.stack([given["beta"], rng.uniform(0, 1, tokens(sizes)) / sizes.size], -1),
        "later_keys": rng.normal(size=tokens(sizes, 1, sizes.size)),
        "later_values": rng.normal(size=tokens(sizes, 1, sizes.value_size)),
    }


def erased_and_written(rng, sizes):
    return {
        "log_decay": -rng.uniform(0, 1, tokens(sizes, sizes.size)),
        "erase": rng.uniform(0, 1, tokens(sizes, sizes.size)) / sizes.size,
        "write": rng.uniform(0, 1, tokens(sizes, sizes.value_size)),
    }


def bounded_strengths(arrays):
    """The arrays, with strengths that keep the state bounded for any keys: beta |k|^2 <= 1."""
    beta = arrays["beta"] / jnp.maximum(1, (arrays["key"] ** 2).sum(-1))
    return {**arrays, "beta": beta.astype(arrays["beta"].dtype)}


def bounded_steps(arrays):
    """The arrays, with strengths that keep the state bounded in every step."""
    keys = jnp.concatenate([arrays["key"][..., None, :], arrays["later_keys"]], -2)
    beta = arrays["beta"] / jnp.maximum(1, (keys**2).sum(-1))
    return {**arrays, "beta": beta.astype(arrays["beta"].dtype)}


def bounded_erasing(arrays):
    """The arrays, with erase gates that keep the state bounded for any keys."""
    erase = arrays["erase"] / jnp.maximum(1, (arrays["key"] ** 2).sum(-1, keepdims=True))
    return {**arrays, "erase": erase.astype(arrays["erase"].dtype)}


def faded(x, positions):
    """Features that depend on positions, in place of a rotary embedding."""
    wide = dtypes.wide(x)
    factor = jnp.cos(positions.astype(wide) / 3)[..., None, None]
    return (x.astype(wide) * factor).astype(x.dtype)


def removals(rng, sizes):
    shape = tokens(sizes, sizes.size)
    removal_key = rng.normal(size=shape)
    return {
        "log_decay": -rng.uniform(0, 1, size=shape),
        "removal_key": removal_key / np.linalg.norm(removal_key, axis=-1, keepdims=True),
        "learning_rate": rng.uniform(0, 1, size=shape),
    }
