"""Constructor options that several modules share, declared and documented once, in groups.

A module names its own arguments, and takes those of a group as `**options: Unpack[Group]`. A module
that passes further options on, to an attention function or to other mixers, annotates them
`Annotated[Any, Group]`. The base class `effattn.nn.module.Module` makes that a plain signature,
which `help` and editors show. An unknown option is Python's TypeError, or a ValueError of the
function or mixer that it was passed on to.
An argument that a module names itself replaces the group's argument of the same name.

Everywhere `in_features` is D, the number of features per token, and `num_heads` is N, the number of
(query) heads. A constructor raises `ValueError` for inconsistent sizes, and for options that the
mechanism does not support.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Required, TypedDict, get_args, get_origin, is_typeddict

import jax.numpy as jnp
from flax import nnx

from effattn.nn import initializers
from effattn.nn.rotary import RotaryEmbedding


class Dtypes(TypedDict, total=False):
    """Dtypes of a module.

    Attributes:
      dtype: computation dtype; default None, the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters. Default float32.
    """

    dtype: Any
    param_dtype: Any


class Parameters(Dtypes, total=False):
    """Parameters: random streams and dtypes.

    Attributes:
      rngs: random streams for parameter initialisation. Required.
    """

    rngs: Required[nnx.Rngs]


class Initializers(TypedDict, total=False):
    """Initializers of projections.

    Attributes:
      kernel_init: initializer of the projections. Default LeCun normal.
      out_kernel_init: initializer of the output projection; default None, `kernel_init`.
    """

    kernel_init: Callable[..., Any]
    out_kernel_init: Callable[..., Any] | None


class Direction(TypedDict, total=False):
    """Causal or bidirectional mixing.

    Attributes:
      is_causal: token t reads tokens 0 to t only. Default True, and False for bidirectional
        mechanisms. A mixer whose mechanism has one direction accepts that direction only.
    """

    is_causal: bool


class Dropout(TypedDict, total=False):
    """Dropout of the attention weights.

    Attributes:
      dropout_rate: dropout rate of the attention weights, in [0, 1). Default 0, the only rate of a
        mechanism without the capability "dropout". Dropout is active in calls that get `rngs`;
        `train()` and `eval()` have no effect.
    """

    dropout_rate: float


class Heads(TypedDict, total=False):
    """Sizes of heads.

    Attributes:
      num_kv_heads: K, number of key and value heads, a divisor of N; default None, N.
      head_dim: H, head dimension of queries and keys; default None, D / N.
    """

    num_kv_heads: int | None
    head_dim: int | None


class Implementation(TypedDict, total=False):
    """Choice of the implementation of a recurrence.

    Attributes:
      implementation: see `effattn.options.Implementation`.
    """

    implementation: str | tuple[str, ...] | None


class Execution(Implementation, total=False):
    """How the recurrence of a mixer is computed.

    Attributes:
      chunk_size: see the mechanism's function in `effattn`.
    """

    chunk_size: int | None


class Mixing(Direction, Dropout, Parameters, total=False):
    """Options of every mixer: direction, dropout and parameters."""


class WithCell(Mixing, Implementation, total=False):
    """Options of mixers with a recurrent cell: those of `Mixing`, and the implementation."""


class Projected(Mixing, Initializers, total=False):
    """Options of mixers with projections: those of `Mixing`, and initializers."""


class Recurrent(Projected, Execution, total=False):
    """Options of recurrent mixers: those of `Projected`, and of `Execution`."""


class Attending(Parameters, Initializers, Dropout, Heads, total=False):
    """Options of modules around an attention function.

    Attributes:
      value_dim: Hv, head dimension of values; default None, H.
      qk_norm: RMS-normalises the features of each query and key head, with a learned scale. Default
        False.
      use_bias: whether the projections to and from heads have biases. Default False.
    """

    value_dim: int | None
    qk_norm: bool
    use_bias: bool


class SelfAttending(Attending, Direction, total=False):
    """Options of `SelfAttention` and its subclasses: those of `Attending`, direction and rotary.

    Attributes:
      rotary: rotary position embedding of queries and keys; default None, no rotation.
    """

    rotary: RotaryEmbedding | None


# Annotation of `**options`: the options of `SelfAttention`, and arguments of its function.
SelfAttentionOptions = Annotated[Any, SelfAttending]

# Default values other than None.
DEFAULTS: dict[str, Any] = {
    "param_dtype": jnp.float32,
    "kernel_init": initializers.kernel_init,
    "is_causal": True,
    "dropout_rate": 0.0,
    "qk_norm": False,
    "use_bias": False,
}


def signature_of(init: Callable[..., Any]) -> inspect.Signature:
    """The signature of a constructor, with the options of its group in place of `**options`."""
    own = inspect.signature(init)
    parameters, rest = [], []
    for parameter in own.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        *_, group = (None, *get_args(parameter.annotation))
        if not is_typeddict(group) or get_origin(parameter.annotation) is Annotated:
            rest = [parameter]
        if is_typeddict(group):
            parameters += _of_group(group, own.parameters)
    return own.replace(parameters=parameters + rest)


def _of_group(group, own):
    for name, annotation in group.__annotations__.items():
        if name in own:
            continue
        required = get_origin(annotation) is Required
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else DEFAULTS.get(name),
            annotation=get_args(annotation)[0] if required else annotation,
        )
