"""Typed configuration tree: every field that a run can set, with its default.

The config file of a run (`configs/*.py`) defines `get_config() -> Config`. No other module gives a hyperparameter a
default: every value comes from this file, the config file or an override. This module does not import JAX, so reading
and checking a configuration is instant.

Annotations are real types, not strings (no `from __future__ import annotations`), because
`ml_collections.config_flags` reads them to parse `--config.a.b=value`.
"""

import dataclasses
import typing
from typing import Any

from jaxllm.config.optimizers import OPTIMIZERS

# Accepted values of string fields: one table for the check, the error message and the documentation.
CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": ("python", "text", "jsonl", "parquet", "tokens", "chat"),
    "optimizer.name": tuple(OPTIMIZERS),
    "optimizer.schedule": ("constant", "linear", "cosine", "wsd"),
    "optimizer.moment_dtype": ("float32", "bfloat16"),
    "optimizer.offload": ("none", "moments", "all"),
    "attention.implementation": ("auto", "pallas", "cudnn", "xla"),
    "precision.policy": ("auto", "fp32", "bf16", "fp16", "bf16_pure"),
    "ledger.check": ("off", "warn", "strict"),
    "model.mlp": ("gelu", "swiglu", "geglu"),
    "model.norm": ("layernorm", "rmsnorm", "rmsnorm_plus_one"),
    "model.norm_placement": ("pre", "post", "sandwich"),
    "model.positions": ("learned", "rotary"),
    "model.qk_norm_over": ("head", "projection"),
    "model.rope_scaling": ("none", "linear", "llama3", "yarn", "longrope"),
}


# full: causal attention to all previous tokens | sliding: attention to the last `window` tokens | nope: full, without
# rotary embeddings (Kazemnejad et al. 2023), in a model whose other layers have them.
LAYER_KINDS = ("full", "sliding", "nope")


# Projections that can have a low-rank adapter -> the sub-layer that each belongs to.
LORA_TARGETS = {"q": "attn", "k": "attn", "v": "attn", "out": "attn", "gate": "mlp", "up": "mlp", "down": "mlp"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Hyperparameters that define a transformer; those of published models are in `jaxllm.architectures`.

    Frozen and hashable, because it is a static argument of the jitted programs.
    """

    vocab_size: int
    layers: int
    width: int  # model dimension D
    heads: int  # query heads N
    kv_heads: int  # key/value heads K; N % K == 0
    head_dim: int  # H; not always width / heads
    mlp_width: int  # F; the width of one expert in a mixture of experts
    context_length: int  # maximum sequence length, in tokens
    mlp: str  # gelu (tanh approximation, two matrices) | swiglu | geglu (three matrices)
    norm: str  # layernorm | rmsnorm | rmsnorm_plus_one (scale is 1 + w)
    norm_placement: str  # norm of each sub-layer: pre (before it) | post (after it) | sandwich (both)
    norm_eps: float
    positions: str  # learned | rotary
    qkv_bias: bool
    out_bias: bool  # attention output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on queries and on keys, before the rotary embedding
    tied_embeddings: bool
    init_std: float
    qk_norm_over: str = "head"  # elements that one norm covers: head | projection (all heads together)
    pattern: tuple[str, ...] = ("full",)  # kinds (LAYER_KINDS) of consecutive layers, repeated over the depth
    window: int = 0  # tokens a sliding layer attends to, including the query; 0 if there is none
    embedding_scale: float = 1.0
    query_scale: float = 0.0  # multiplier of attention logits; 0 means head_dim ** -0.5
    attention_softcap: float = 0.0  # 0 disables it
    logit_softcap: float = 0.0  # 0 disables it
    rope_theta: float = 10_000.0
    rope_theta_sliding: float = 0.0  # for sliding layers, never scaled; 0: rope_theta with its scaling
    rope_dim: int = 0  # leading elements of a head that are rotated; 0 means all of head_dim
    rope_scaling: str = "none"  # none | linear | llama3 | yarn | longrope
    rope_factor: float = 1.0  # extended context / original context
    rope_original_context: int = 0  # llama3, yarn, longrope: context before scaling
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0  # llama3
    rope_beta_fast: float = 32.0  # yarn
    rope_beta_slow: float = 1.0  # yarn
    rope_short_factors: tuple[float, ...] = ()  # longrope: per pair, for sequences within the original context
    rope_long_factors: tuple[float, ...] = ()  # longrope: per pair, for longer sequences
    rope_attention_factor: float = 0.0  # yarn, longrope: scales rotated q and k; 0: method default
    experts: int = 0  # 0 means a dense MLP
    experts_per_token: int = 0
    normalize_routing: bool = True  # weights of the selected experts sum to 1
    router_aux_weight: float = 0.0  # coefficient of the load-balancing loss
    unroll: int = 1  # repeats of the layer pattern per scan iteration

    @property
    def attention_scale(self) -> float:
        return self.query_scale or self.head_dim**-0.5

    @property
    def gated(self) -> bool:
        """True if the MLP is gated (three matrices instead of two)."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def rotated(self) -> int:
        """Elements of a head that rotary embeddings rotate."""
        return self.rope_dim or self.head_dim

    @property
    def repeats(self) -> int:
        """Number of whole layer patterns: the length of the scan over layers."""
        return self.layers // len(self.pattern)

    @property
    def tail(self) -> tuple[str, ...]:
        """Kinds of the remaining layers after the last whole pattern."""
        return self.pattern[: self.layers % len(self.pattern)]


if typing.TYPE_CHECKING:
    ModelConfig = Any
else:
    # `name` plus every field of Architecture as an optional override. Generated from Architecture, so that a new
    # field is declared once.
    ModelConfig = dataclasses.make_dataclass(
        "ModelConfig",
        [
            ("name", str, dataclasses.field(default="gpt2")),
            *((f.name, f.type | None, dataclasses.field(default=None)) for f in dataclasses.fields(Architecture)),
        ],
    )


@dataclasses.dataclass
class DataConfig:
    """Training data: its source, tokenizer, sequence length and order."""

    # python: source code of the standard library | text | jsonl | parquet | tokens | chat: conversations, trained on
    # the assistant's turns only (jaxllm/data/conversations.py)
    source: str = "python"
    path: str = ""  # file or glob; unused by the python source
    validation_path: str = ""  # held-out files; if "", documents are held out by a hash of their names
    validation_fraction: float = 0.05  # fraction of documents held out if validation_path is ""
    text_field: str = "text"  # JSON key or Parquet column
    # bytes, or the path of a tokenizer.json or of its folder, from which the chat template is read too. With the
    # default, a run with init_from uses the tokenizer of that model, and its stored configuration says "model".
    tokenizer: str = "bytes"
    token_dtype: str = "uint16"  # dtype of the tokens source (.bin)
    sequence_length: int = 256
    shuffle: bool = True
    shuffle_window: int = 256  # rows shuffled together after packing, so that one long document does not fill a batch
    seed: int = 0
    streams: int = 1  # document streams that fill a batch in equal parts; divided among processes


@dataclasses.dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: str = "adamw"
    peak_lr: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: length of the final decay; 0 means a fifth of the run
    final_lr_fraction: float = 0.0  # final learning rate / peak_lr
    weight_decay: float = 0.0  # decoupled; applied to matrices, not to biases or norms
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # maximum global gradient norm; 0 disables clipping
    moment_dtype: str = "float32"  # storage dtype of the moments; updates are computed in float32
    offload: str = "none"  # stored in host memory between updates: none | moments | all (and float32 master weights)


@dataclasses.dataclass
class PrecisionConfig:
    # auto: fp32 on a CPU, bf16 elsewhere | fp32 | bf16, fp16: compute and gradients in 16 bits, weights and moments
    # in float32 | bf16_pure: weights in bfloat16 too
    policy: str = "auto"
    loss_scale: float = 2.0**15  # fp16: initial scale; it halves when gradients overflow
    loss_scale_growth: int = 2000  # fp16: steps without overflow before the scale doubles


@dataclasses.dataclass
class AttentionConfig:
    # Implementation in training and evaluation. pallas: the kernels of this package, for GPUs and TPUs | cudnn |
    # xla: plain matmuls | auto: pallas if its kernels support the run, else xla; the log gives the choice and reason
    implementation: str = "auto"


@dataclasses.dataclass
class RematConfig:
    # What blocks save for the backward pass. none: all activations | full: block inputs only | sqrt: the inputs of
    # about √layers blocks | dots: outputs of matmuls with weights | names:a,b: these tags (jaxllm/config/remat.py) |
    # offload:a,b: these tags, in host memory
    policy: str = "none"


@dataclasses.dataclass
class LoraConfig:
    """Low-rank adapters for frozen weights (Hu et al. 2021): y = x·W + (alpha / rank) · (x·A)·B."""

    rank: int = 0  # columns of A and rows of B; 0 disables adapters: all weights are trained
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")  # projections with an adapter in every layer, from LORA_TARGETS


@dataclasses.dataclass
class MeshConfig:
    """Number of devices along each mesh axis; their product is the number of devices of the run."""

    replica: int = 1  # replicas of the sharded state (hybrid sharding), each with its shard of the batch
    data: int = 1  # data-parallel axis: shards the batch, and with ZeRO the state
    tensor: int = 1  # tensor-parallel axis: shards heads, MLP and vocabulary
    zero: int = 0  # sharded over `data`: 0 nothing | 1 optimizer state | 2 and gradients | 3 and parameters


@dataclasses.dataclass
class TrainConfig:
    steps: int = 1000  # optimizer updates
    batch_size: int = 8  # sequences per step, over all devices and micro-batches
    accumulate: int = 1  # micro-batches per step (gradient accumulation)
    loss_chunk: int = 4096  # tokens per device whose logits are materialized at once
    attention_chunk: int = 0  # xla: queries of a sequence whose scores are materialized at once; 0: all
    seed: int = 0  # seed of the initial weights


@dataclasses.dataclass
class CheckpointConfig:
    every: int = 200  # in steps; the last step is always saved; 0 saves only the last
    keep: int = 2  # number of newest checkpoints to keep


@dataclasses.dataclass
class EvalConfig:
    every: int = 200  # in steps; the last step is always evaluated; 0 evaluates only the last
    batches: int = 16  # maximum number of batches; the same ones each time


@dataclasses.dataclass
class LogConfig:
    every: int = 10  # steps between log lines if the output is not a terminal; metrics.jsonl has every step
    tensorboard: bool = False
    profile_start: int = 0  # first step of the jax.profiler trace
    profile_steps: int = 0  # number of steps to trace; 0 disables the trace


@dataclasses.dataclass
class LedgerConfig:
    # Compares the ledger with the running program after the second step. off: no check | warn: logs differences |
    # strict: a difference saves and stops the run, and a run that does not fit by the formulas does not start
    check: str = "warn"
    tolerance: float = 0.15  # on the peak: (formula − measured) / measured; the state must match exactly


@dataclasses.dataclass
class Config:
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    remat: RematConfig = dataclasses.field(default_factory=RematConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    ledger: LedgerConfig = dataclasses.field(default_factory=LedgerConfig)
    # Model whose weights the run starts from: the workdir of a training run, a Hugging Face folder, a .gguf file, or a
    # hub id. `model` then comes from it: leave `model` unset, or name the same architecture.
    init_from: str = ""
