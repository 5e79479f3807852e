"""Which code computes attention, and why: decided here for training, evaluation, decoding, the ledger and the planner.

No JAX is imported.

    pallas   the kernels of `jaxllm.kernels.flash.api`: memory O(length), masks' empty tiles never multiplied
    cudnn    cuDNN's, through `jax.nn.dot_product_attention`
    xla      `jaxllm.kernels.reference`: scores are arrays, of all queries or of `config.train.attention_chunk` at once
    auto     pallas on a GPU or TPU for whatever its kernels can do, xla elsewhere

A name means that one: where it cannot run there is an error, and only `auto` falls back, and says so.
"""

import dataclasses
from collections.abc import Iterator

from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError

# What the Pallas kernels take.
LEAST_HEAD, LARGEST_HEAD = 16, 256
KERNEL_DTYPES = {"gpu": ("float32", "bfloat16", "float16"), "tpu": ("float32", "bfloat16")}
# Of each dimension of a product in the decode kernel for GPUs: a tensor core takes that many.
DECODE_HEAD_MULTIPLE = 16

_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_LARGEST_HEAD, _CUDNN_HEAD_MULTIPLE = 128, 8
# Tags of remat policies that only some implementations compute.
_SCORE_TAGS = ("attn_scores", "attn_probs")
_KERNEL_TAGS = ("attn_lse",)
_FIELD = "config.attention.implementation"


@dataclasses.dataclass(frozen=True)
class Attention:
    """What a program's attention runs by; static.

    Attributes:
      implementation: pallas | cudnn | xla.
      platform: whose kernels: cpu | gpu | tpu.
      why: in a few words; no part of what the program is.
      interpret: Pallas kernels as plain JAX, on any device: for tests.
    """

    implementation: str
    platform: str
    why: str = dataclasses.field(default="", compare=False)
    interpret: bool = False

    @property
    def line(self) -> str:
        """For logs."""
        return f"attention: {self.implementation} ({self.why})"


# By its definition; of programs that have no configuration.
PLAIN = Attention("xla", "cpu", "its definition")


def resolve(config: Config, model: Architecture, platform: str, dtype: str) -> Attention:
    """What training and evaluation run by.

    Args:
      platform: cpu | gpu | tpu.
      dtype: that computes: float32 | bfloat16 | float16.
    Raises:
      UserError: the implementation that the configuration names cannot do the run; says what it cannot.
    """
    asked = config.attention.implementation
    if asked != "auto":
        require(config, model)
        for fault in _faults_there(asked, model, platform, dtype):
            raise UserError(f"{_FIELD} is {asked!r}, and {fault}; set it to auto or xla")
        return Attention(asked, platform, f"{_FIELD} says so")
    # The kernels' tiles are what both kinds of accelerator are made for, and no [T, T] array is left: a TPU's compiler
    # takes them for every head dimension and length that was tried. A CPU has none.
    faults = [*_faults_there("pallas", model, platform, dtype), *_faults_of_fields("pallas", config, model)]
    if faults:
        return Attention("xla", platform, f"auto: {faults[0]}")
    return Attention("pallas", platform, f"auto: its kernels for a {platform}")


def require(config: Config, model: Architecture) -> None:
    """The named implementation can do what other fields ask for, wherever it runs.

    Raises:
      UserError: it cannot; names both fields and the fix.
    """
    asked = config.attention.implementation
    for fault in _faults_of_fields(asked, config, model) if asked != "auto" else ():
        raise UserError(f"{_FIELD} is {asked!r}, and {fault}; change one of the two")


def _faults_there(implementation: str, model: Architecture, platform: str, dtype: str) -> Iterator[str]:
    """Why it cannot run on a platform, in a dtype, for a model."""
    H = model.head_dim
    if implementation == "pallas":
        if platform not in KERNEL_DTYPES:
            yield f"a {platform} has no kernels"
            return
        if not LEAST_HEAD <= H <= LARGEST_HEAD:
            yield f"kernels are for a head_dim of {LEAST_HEAD} to {LARGEST_HEAD}, not {H}"
        if dtype not in KERNEL_DTYPES[platform]:
            yield f"kernels for a {platform} take {' or '.join(KERNEL_DTYPES[platform])}, not {dtype}"
    if implementation == "cudnn":
        if platform != "gpu":
            yield f"a {platform} has no cuDNN"
        if dtype not in _CUDNN_DTYPES:
            yield f"cuDNN's attention takes {' or '.join(_CUDNN_DTYPES)}, not {dtype}"
        if H % _CUDNN_HEAD_MULTIPLE or H > _CUDNN_LARGEST_HEAD:
            yield (
                f"cuDNN's attention takes a head_dim that is a multiple of {_CUDNN_HEAD_MULTIPLE} up to "
                f"{_CUDNN_LARGEST_HEAD}, not {H}"
            )


def _faults_of_fields(implementation: str, config: Config, model: Architecture) -> Iterator[str]:
    """What other fields ask for that it has not got."""
    policy = config.remat.policy
    tags = [tag.strip() for tag in policy.partition(":")[2].split(",")]
    absent: tuple[str, ...] = _KERNEL_TAGS if implementation == "xla" else _SCORE_TAGS
    if implementation == "cudnn":
        absent += _KERNEL_TAGS
        if model.attention_softcap:
            yield f"cuDNN's attention has no soft cap (config.model.attention_softcap is {model.attention_softcap:g})"
        if config.data.sequence_length % 2:
            yield f"cuDNN's attention takes an even config.data.sequence_length, not {config.data.sequence_length}"
    for tag in tags:
        if tag in absent:
            yield f"{tag}, which config.remat.policy keeps, is nothing that {implementation} computes"
    if implementation != "xla" and config.train.attention_chunk:
        chunk = config.train.attention_chunk
        yield f"config.train.attention_chunk ({chunk}) is for scores, which only xla has; 0 is none"


def decoding(platform: str, head_dim: int, *dtypes: str) -> Attention:
    """What attention of a new token over a cache runs by.

    Args:
      dtypes: of queries and of the cache.
    """
    if platform not in KERNEL_DTYPES:
        return Attention("xla", platform, f"a {platform} has no kernels")
    if platform == "gpu" and head_dim % DECODE_HEAD_MULTIPLE:
        why = f"the kernel for a gpu takes a head_dim that is a multiple of {DECODE_HEAD_MULTIPLE}, not {head_dim}"
        return Attention("xla", platform, why)
    if platform == "tpu" and "float16" in dtypes:
        return Attention("xla", platform, "a tpu has no float16")
    return Attention("pallas", platform, f"the kernel for a {platform}")
