"""Selects the attention implementation for training, evaluation, decoding, the ledger and the planner.

This module does not import JAX.

    pallas   the kernels of `jaxllm.kernels.flash.api`: O(length) memory; fully masked tiles are skipped
    cudnn    cuDNN attention, through `jax.nn.dot_product_attention`
    xla      `jaxllm.kernels.reference`: materializes the scores of all queries, or of `config.train.attention_chunk`
             queries at a time
    auto     pallas on a GPU or TPU if its kernels support the run, xla otherwise

An implementation named explicitly is used or raises an error. Only `auto` falls back, and the log gives the reason.
"""

import dataclasses
from collections.abc import Iterator

from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError

# Range of head_dim and compute dtypes that the Pallas kernels support.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
KERNEL_DTYPES = {"gpu": ("float32", "bfloat16", "float16"), "tpu": ("float32", "bfloat16")}
# The GPU decode kernel needs matmul dimensions that are multiples of this, the tile of a tensor core.
DECODE_HEAD_MULTIPLE = 16

_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_MAX_HEAD_DIM, _CUDNN_HEAD_MULTIPLE = 128, 8
# Activation tags of remat policies that only some implementations produce.
_SCORE_TAGS = ("attn_scores", "attn_probs")
_KERNEL_TAGS = ("attn_lse",)
_FIELD = "config.attention.implementation"


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention implementation selected for a program; static (hashable).

    Attributes:
      implementation: pallas | cudnn | xla.
      platform: platform of the kernels: cpu | gpu | tpu.
      why: short reason for the selection, for logs; ignored in comparisons and hashing.
      interpret: run the Pallas kernels as plain JAX on any device, for tests.
    """

    implementation: str
    platform: str
    why: str = dataclasses.field(default="", compare=False)
    interpret: bool = False

    @property
    def line(self) -> str:
        """One-line description for logs."""
        return f"attention: {self.implementation} ({self.why})"


# Reference implementation, for programs that have no configuration.
PLAIN = Attention("xla", "cpu", "reference implementation")


def resolve(config: Config, model: Architecture, platform: str, dtype: str) -> Attention:
    """Selects the attention implementation for training and evaluation.

    Args:
      config: configuration of the run.
      model: its architecture.
      platform: cpu | gpu | tpu.
      dtype: compute dtype: float32 | bfloat16 | float16.
    Raises:
      UserError: the implementation named in the configuration does not support the run; the message says why.
    """
    implementation = config.attention.implementation
    if implementation != "auto":
        check_fields(config, model)
        for fault in _device_faults(implementation, model, platform, dtype):
            raise UserError(f"{_FIELD} is {implementation!r}, but {fault}; set it to auto or xla")
        return Attention(implementation, platform, f"set by {_FIELD}")
    # The kernels' tiles suit the matrix units of GPUs and TPUs, and no [T, T] array is materialized. The TPU compiler
    # accepted every head dimension and length that was tried. There are no kernels for CPUs.
    faults = [*_device_faults("pallas", model, platform, dtype), *_field_faults("pallas", config, model)]
    if faults:
        return Attention("xla", platform, f"auto: {faults[0]}")
    return Attention("pallas", platform, f"auto: supported on {platform}")


def check_fields(config: Config, model: Architecture) -> None:
    """Checks the named implementation against the other configuration fields, on any platform.

    Raises:
      UserError: the implementation does not support a field's value; names both fields and the fix.
    """
    implementation = config.attention.implementation
    for fault in _field_faults(implementation, config, model) if implementation != "auto" else ():
        raise UserError(f"{_FIELD} is {implementation!r}, but {fault}; change one of the two")


def _device_faults(implementation: str, model: Architecture, platform: str, dtype: str) -> Iterator[str]:
    """Yields the reasons why an implementation does not support a platform, compute dtype or head_dim."""
    H = model.head_dim
    if implementation == "pallas":
        if platform not in KERNEL_DTYPES:
            yield f"no Pallas kernels for {platform}"
            return
        if not MIN_HEAD_DIM <= H <= MAX_HEAD_DIM:
            yield f"the kernels support a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {H}"
        if dtype not in KERNEL_DTYPES[platform]:
            yield f"the {platform} kernels support {' or '.join(KERNEL_DTYPES[platform])}, not {dtype}"
    if implementation == "cudnn":
        if platform != "gpu":
            yield f"cuDNN does not run on {platform}"
        if dtype not in _CUDNN_DTYPES:
            yield f"cuDNN attention supports {' or '.join(_CUDNN_DTYPES)}, not {dtype}"
        if H % _CUDNN_HEAD_MULTIPLE or H > _CUDNN_MAX_HEAD_DIM:
            yield (
                f"cuDNN attention supports a head_dim that is a multiple of {_CUDNN_HEAD_MULTIPLE} up to "
                f"{_CUDNN_MAX_HEAD_DIM}, not {H}"
            )


def _field_faults(implementation: str, config: Config, model: Architecture) -> Iterator[str]:
    """Yields the configuration fields that request something an implementation does not support."""
    policy = config.remat.policy
    tags = [tag.strip() for tag in policy.partition(":")[2].split(",")]
    absent: tuple[str, ...] = _KERNEL_TAGS if implementation == "xla" else _SCORE_TAGS
    if implementation == "cudnn":
        absent += _KERNEL_TAGS
        if model.attention_softcap:
            yield f"cuDNN attention does not support config.model.attention_softcap ({model.attention_softcap:g})"
        if config.data.sequence_length % 2:
            yield f"cuDNN attention needs an even config.data.sequence_length, not {config.data.sequence_length}"
    for tag in tags:
        if tag in absent:
            yield f"{tag} (saved by config.remat.policy) is not computed by {implementation} attention"
    if implementation != "xla" and config.train.attention_chunk:
        chunk = config.train.attention_chunk
        yield f"config.train.attention_chunk ({chunk}) is supported by xla only; 0 disables it"


def decoding(platform: str, head_dim: int, *dtypes: str) -> Attention:
    """Selects the implementation for decode attention: one new token over the KV cache.

    Args:
      platform: cpu | gpu | tpu.
      head_dim: H, elements per head.
      dtypes: dtypes of the queries and of the cache.
    """
    if platform not in KERNEL_DTYPES:
        return Attention("xla", platform, f"no Pallas kernels for {platform}")
    if platform == "gpu" and head_dim % DECODE_HEAD_MULTIPLE:
        why = f"the gpu kernel needs a head_dim that is a multiple of {DECODE_HEAD_MULTIPLE}, not {head_dim}"
        return Attention("xla", platform, why)
    if platform == "tpu" and "float16" in dtypes:
        return Attention("xla", platform, "the tpu kernel does not support float16")
    return Attention("pallas", platform, f"supported on {platform}")
