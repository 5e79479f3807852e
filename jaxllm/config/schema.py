"""The typed configuration tree: every field a run can set, and its default.

A run's file (`configs/*.py`) has `get_config() -> Config`. Nothing below this module gives a
hyperparameter a default, so a value that is not here or in the run's file does not exist. No JAX is
imported: reading and checking a configuration is instant.

The annotations are real types, not strings (no `from __future__ import annotations`), because
`ml_collections.config_flags` reads them to parse `--config.a.b=value`.
"""

import dataclasses
import typing
from typing import Any

# What a string field may hold. One table, so that the check, the message and the documentation agree.
CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": ("python", "text", "jsonl", "parquet", "tokens", "chat"),
    "optimizer.name": ("sgd", "momentum", "adam", "adamw", "adafactor", "lion", "muon"),
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


# full: sees all tokens before | sliding: the last `window` of them | nope: full, and never rotated (Kazemnejad et al.
# 2023), among layers that are.
LAYER_KINDS = ("full", "sliding", "nope")


# Projection that can have a low-rank adapter -> the part of a layer that it is in.
LORA_TARGETS = {"q": "attn", "k": "attn", "v": "attn", "out": "attn", "gate": "mlp", "up": "mlp", "down": "mlp"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Every number that defines a transformer; the published ones stand in `jaxllm.architectures`.

    Frozen and hashable: it is a static argument of the jitted programs.
    """

    vocab_size: int
    layers: int
    width: int  # model dimension D
    heads: int  # query heads N
    kv_heads: int  # key/value heads K; N % K == 0
    head_dim: int  # H; not always width / heads
    mlp_width: int  # F; of one expert, where there are experts
    context_length: int  # positions the model was made for
    mlp: str  # gelu (tanh approximation, two matrices) | swiglu | geglu (three matrices)
    norm: str  # layernorm | rmsnorm | rmsnorm_plus_one (scale is 1 + w)
    norm_placement: str  # of each sub-layer's norm: pre (before it) | post (after it) | sandwich (one each)
    norm_eps: float
    positions: str  # learned | rotary
    qkv_bias: bool
    out_bias: bool  # attention output projection
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm of queries and one of keys, before they are rotated
    tied_embeddings: bool
    init_std: float
    qk_norm_over: str = "head"  # numbers of a token that one norm takes: head | projection (all heads together)
    pattern: tuple[str, ...] = ("full",)  # kinds of consecutive layers, repeated: of LAYER_KINDS
    window: int = 0  # tokens a sliding layer sees, itself included; 0 where no layer slides
    embedding_scale: float = 1.0
    query_scale: float = 0.0  # attention logits are multiplied by it; 0 stands for head_dim ** -0.5
    attention_softcap: float = 0.0  # 0 is no cap
    logit_softcap: float = 0.0
    rope_theta: float = 10_000.0
    rope_theta_sliding: float = 0.0  # of sliding layers, never scaled; 0: the same as rope_theta, scaled alike
    rope_dim: int = 0  # first numbers of a head that are rotated, the rest is left alone; 0 is all of head_dim
    rope_scaling: str = "none"  # none | linear | llama3 | yarn | longrope
    rope_factor: float = 1.0  # longer context over original one
    rope_original_context: int = 0  # llama3, yarn and longrope: context before scaling
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0  # llama3
    rope_beta_fast: float = 32.0  # yarn
    rope_beta_slow: float = 1.0  # yarn
    rope_short_factors: tuple[float, ...] = ()  # longrope: each pair's, of sequences within the original context
    rope_long_factors: tuple[float, ...] = ()  # longrope: of longer ones
    rope_attention_factor: float = 0.0  # yarn and longrope: on rotated queries and keys; 0 is the method's own
    experts: int = 0  # 0 is a dense MLP
    experts_per_token: int = 0
    normalize_routing: bool = True  # the chosen experts' weights sum to 1
    router_aux_weight: float = 0.0  # of the load-balancing loss
    unroll: int = 1  # layer-pattern repeats unrolled in one scan iteration

    @property
    def attention_scale(self) -> float:
        return self.query_scale or self.head_dim**-0.5

    @property
    def gated(self) -> bool:
        """A gated MLP has three matrices, a plain one two."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def rotated(self) -> int:
        """Numbers of a head that are rotated, where positions are rotary."""
        return self.rope_dim or self.head_dim

    @property
    def repeats(self) -> int:
        """Times the whole layer pattern is repeated: the length of the scan over layers."""
        return self.layers // len(self.pattern)

    @property
    def tail(self) -> tuple[str, ...]:
        """Kinds of the layers after the last whole pattern."""
        return self.pattern[: self.layers % len(self.pattern)]


if typing.TYPE_CHECKING:
    ModelConfig = Any
else:
    # `name` and, beside it, every field of Architecture as an optional override. Made from Architecture,
    # so that a new field is declared once.
    ModelConfig = dataclasses.make_dataclass(
        "ModelConfig",
        [
            ("name", str, dataclasses.field(default="gpt2")),
            *((f.name, f.type | None, dataclasses.field(default=None)) for f in dataclasses.fields(Architecture)),
        ],
    )


@dataclasses.dataclass
class DataConfig:
    """What is read, and how it becomes batches."""

    # python: the standard library's own source | text | jsonl | parquet | tokens | chat: conversations, of which only
    # the assistant's turns are trained on (jaxllm/data/conversations.py)
    source: str = "python"
    path: str = ""  # a file or glob; unused by the python source
    validation_path: str = ""  # held-out files; "" holds out documents by a hash of their names
    validation_fraction: float = 0.05  # of the documents, where validation_path is ""
    text_field: str = "text"  # jsonl key or parquet column
    # bytes, or the path of a tokenizer.json or of the folder that holds it, whose chat template then counts too. Left
    # at bytes, a run that starts from a model takes the model's own, which its workdir then calls "model".
    tokenizer: str = "bytes"
    token_dtype: str = "uint16"  # of the tokens source (.bin)
    sequence_length: int = 256
    shuffle: bool = True
    shuffle_window: int = 256  # packed rows mixed after packing, so that one long document does not fill a batch
    seed: int = 0
    streams: int = 1  # sequences of documents that rows are drawn from in turn; many processes share them out


@dataclasses.dataclass
class OptimizerConfig:
    """The update rule and its schedule."""

    name: str = "adamw"
    peak_lr: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: length of the final decay; 0 is a fifth of the run
    final_lr_fraction: float = 0.0  # of peak_lr, at the end
    weight_decay: float = 0.0  # decoupled; on matrices, never on biases or norms
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # global gradient norm; 0 is off
    moment_dtype: str = "float32"  # of the moments between steps; they are updated in float32
    offload: str = "none"  # kept in host memory between updates: none | moments | all (float32 master weights too)


@dataclasses.dataclass
class PrecisionConfig:
    # auto: fp32 on a CPU, bf16 elsewhere | fp32 | bf16, fp16: compute and gradients in 16 bit, weights and moments
    # in float32 | bf16_pure: weights too in 16 bit
    policy: str = "auto"
    loss_scale: float = 2.0**15  # fp16: the scale at the start; it halves when gradients overflow
    loss_scale_growth: int = 2000  # fp16: steps without overflow after which it doubles


@dataclasses.dataclass
class AttentionConfig:
    # What computes it in training and evaluation: pallas, our kernels for GPUs and TPUs | cudnn, NVIDIA's | xla, plain
    # products | auto: pallas where its kernels can do it, else xla; the log says which and why
    implementation: str = "auto"


@dataclasses.dataclass
class RematConfig:
    # What blocks keep for the backward pass. none: all of it | full: their inputs only | sqrt: the inputs of about
    # √layers of them | dots: the results of products with weights | names:a,b of the tags in jaxllm/model/remat.py |
    # offload:a,b: these in host memory
    policy: str = "none"


@dataclasses.dataclass
class LoraConfig:
    """Low-rank adapters beside frozen weights (Hu et al. 2021): y = x·W + (alpha / rank) · (x·A)·B."""

    rank: int = 0  # columns of A and rows of B; 0 is off: all weights are trained
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")  # projections that have an adapter, in every layer: of LORA_TARGETS


@dataclasses.dataclass
class MeshConfig:
    """Devices along each mesh axis; their product is the devices of the run."""

    replica: int = 1  # copies of the sharded state (hybrid sharding), each with its share of the batch
    data: int = 1  # shares of the batch, over which ZeRO shards
    tensor: int = 1  # shares of heads, MLP and vocabulary
    zero: int = 0  # over `data`: 0 nothing | 1 optimizer state | 2 and gradients | 3 and parameters


@dataclasses.dataclass
class TrainConfig:
    steps: int = 1000  # updates
    batch_size: int = 8  # sequences a step, over all devices and micro-batches
    accumulate: int = 1  # micro-batches a step
    loss_chunk: int = 4096  # tokens of one device whose logits exist at one time
    attention_chunk: int = 0  # xla: queries of a sequence whose scores exist at one time; 0 is all of them
    seed: int = 0  # of the initial weights


@dataclasses.dataclass
class CheckpointConfig:
    every: int = 200  # steps; the last step is always saved; 0 saves only that
    keep: int = 2  # newest checkpoints kept


@dataclasses.dataclass
class EvalConfig:
    every: int = 200  # steps; the last step is always evaluated; 0 evaluates only that
    batches: int = 16  # at most; the same ones every time


@dataclasses.dataclass
class LogConfig:
    every: int = 10  # steps between lines where the terminal is not live; metrics.jsonl has every step
    tensorboard: bool = False
    profile_start: int = 0  # first step of the jax.profiler trace
    profile_steps: int = 0  # 0 is no trace


@dataclasses.dataclass
class LedgerConfig:
    # Held against the running program after the second step. off: not at all | warn: a line for what is wrong |
    # strict: the run is saved and stops, and one that does not fit by the formulas does not start
    check: str = "warn"
    tolerance: float = 0.15  # of the peak: (formula − measured) / measured; state has none


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
    # A model whose weights the run starts from: the workdir of a training run, a Hugging Face folder, a .gguf file, or
    # an id of the hub. `model` is then its own: leave that alone, or name the same one.
    init_from: str = ""
