"""Checks of relations between configuration fields; the first violation raises a one-line error."""

from collections.abc import Iterable

from jaxllm.config import LAYER_KINDS, LORA_TARGETS, Architecture, Config, OptimizerConfig, remat
from jaxllm.config import attention as attention_choice
from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.config.overrides import check_types, field_paths
from jaxllm.errors import UserError, nearest

Shape = tuple[int, ...]


def check_architecture(model: Architecture) -> None:
    """Checks the relations between the hyperparameters of one architecture.

    Raises:
      UserError: a relation does not hold; names both fields and a fix.
    """
    for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "context_length"):
        if getattr(model, name) < 1:
            raise UserError(f"config.model.{name} is {getattr(model, name)}; it must be at least 1")
    if model.heads % model.kv_heads:
        raise UserError(
            f"config.model.heads ({model.heads}) is not a multiple of config.model.kv_heads ({model.kv_heads}); "
            f"set kv_heads to a divisor of {model.heads}"
        )
    if not model.pattern or set(model.pattern) - set(LAYER_KINDS):
        kinds = " or ".join(map(repr, LAYER_KINDS))
        raise UserError(f"config.model.pattern is {model.pattern!r}; it must list layer kinds, each {kinds}")
    if "sliding" in model.pattern and model.window < 1:
        raise UserError(
            f"config.model.window is {model.window}, but config.model.pattern has sliding layers; "
            "set window to the number of tokens that they attend to"
        )
    if "nope" in model.pattern and model.positions != "rotary":
        raise UserError(
            f"config.model.pattern has 'nope' layers (no rotary embedding), but config.model.positions is "
            f"{model.positions!r}; use 'full' layers instead"
        )
    _check_rotation(model)
    if model.experts and not 1 <= model.experts_per_token <= model.experts:
        raise UserError(
            f"config.model.experts_per_token ({model.experts_per_token}) must be between 1 and "
            f"config.model.experts ({model.experts})"
        )
    if model.unroll < 1:
        raise UserError(f"config.model.unroll is {model.unroll}; it must be at least 1 (1 disables unrolling)")


def _check_rotation(model: Architecture) -> None:
    field = "rope_dim" if model.rope_dim else "head_dim"
    if model.positions == "rotary" and model.rotated % 2:
        raise UserError(
            f"config.model.{field} ({model.rotated}) is odd, but config.model.positions is 'rotary', "
            f"which rotates pairs of elements; make {field} even"
        )
    if not 0 <= model.rope_dim <= model.head_dim:
        raise UserError(
            f"config.model.rope_dim ({model.rope_dim}) must be between 0 and config.model.head_dim ({model.head_dim}); "
            "0 rotates the whole head"
        )
    if model.rope_scaling in ("llama3", "yarn", "longrope") and model.rope_original_context < 1:
        raise UserError(
            f"config.model.rope_scaling is {model.rope_scaling!r}, but config.model.rope_original_context is "
            f"{model.rope_original_context}; set rope_original_context to the context length before scaling"
        )
    if model.rope_scaling == "longrope":
        for name in ("rope_short_factors", "rope_long_factors"):
            factors = getattr(model, name)
            if len(factors) != model.rotated // 2 or not all(factor > 0 for factor in factors):
                raise UserError(
                    f"config.model.{name} has {len(factors)} values, but config.model.rope_scaling 'longrope' needs "
                    f"one for each of the {model.rotated // 2} rotated pairs, all positive"
                )
    if not model.rope_factor > 0:  # also rejects NaN
        raise UserError(f"config.model.rope_factor is {model.rope_factor}; it must be positive")
    if not model.rope_attention_factor >= 0:
        raise UserError(
            f"config.model.rope_attention_factor is {model.rope_attention_factor}; it must be positive, or 0 for the "
            "default of config.model.rope_scaling"
        )


def check(config: Config, model: Architecture) -> None:
    """Checks the whole configuration of a run: types, choices, and relations between fields.

    Args:
      config: the configuration as the user wrote it.
      model: its architecture, resolved by `jaxllm.architectures.resolve`.
    Raises:
      UserError: one line that names the fields and the fix.
    """
    check_types(config)
    check_architecture(model)
    data, train, optimizer = config.data, config.train, config.optimizer
    values = field_paths(config)
    for path, minimum in _MINIMUMS.items():
        if values[path] < minimum:
            raise UserError(f"config.{path} is {values[path]}; it must be at least {minimum}")
    if data.sequence_length > model.context_length:
        raise UserError(
            f"config.data.sequence_length ({data.sequence_length}) is longer than config.model.context_length "
            f"({model.context_length}); lower config.data.sequence_length or raise config.model.context_length"
        )
    if data.source != "python" and not data.path:
        raise UserError(
            f"config.data.path is empty, but config.data.source is {data.source!r}; set it to a file or glob"
        )
    if data.tokenizer == "model" and not config.init_from:
        raise UserError(
            "config.data.tokenizer is 'model' (the tokenizer of config.init_from), but config.init_from is empty; set "
            "one of the two"
        )
    if not 0 < data.validation_fraction < 1:
        raise UserError(f"config.data.validation_fraction is {data.validation_fraction}; it must be between 0 and 1")
    _check_mesh(config, model)
    _check_lora(config, model)
    remat.parse(config.remat.policy)
    attention_choice.check_fields(config, model)
    if optimizer.warmup_steps > train.steps:
        raise UserError(
            f"config.optimizer.warmup_steps ({optimizer.warmup_steps}) exceeds config.train.steps ({train.steps}); "
            "shorten the warm-up"
        )
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.decay_steps > train.steps:
        raise UserError(
            f"config.optimizer.warmup_steps ({optimizer.warmup_steps}) + config.optimizer.decay_steps "
            f"({optimizer.decay_steps}) exceeds config.train.steps ({train.steps}); shorten one of them"
        )
    if not config.ledger.tolerance >= 0:  # also rejects NaN
        raise UserError(
            f"config.ledger.tolerance is {config.ledger.tolerance}; it must be at least 0 (0.15 means 15 %)"
        )
    if not optimizer.peak_lr > 0:  # also rejects NaN
        raise UserError(f"config.optimizer.peak_lr is {optimizer.peak_lr}; it must be positive")


def check_update(
    optimizer: OptimizerConfig, policy: str, mixed: bool, arrays: Iterable[tuple[str, Shape, Shape]]
) -> None:
    """Checks that the optimizer supports the offload setting and the padded array shapes; called before a run starts.

    Args:
      optimizer: configuration of the optimizer.
      policy: the resolved precision policy.
      mixed: True if the policy has float32 master weights.
      arrays: (name, shape, shape in which its moments are stored) of each array.
    Raises:
      UserError: the update is not supported; names the fields or the array, and the fix.
    """
    if optimizer.offload == "all" and not mixed:
        raise UserError(
            f"config.optimizer.offload is 'all' and config.precision.policy {policy!r} has no master weights: "
            "compute weights stay on the device; set it to 'moments', or the policy to bf16"
        )
    if OPTIMIZERS[optimizer.name].elementwise:
        return
    # These updates depend on whole rows and columns, which padding would change.
    if optimizer.offload != "none":
        raise UserError(
            f"config.optimizer.offload is {optimizer.offload!r} and config.optimizer.name={optimizer.name} does not "
            "update array by array; set offload to 'none', or use adamw"
        )
    for name, shape, stored in arrays:
        if shape != stored:
            raise UserError(
                f"{name} {list(shape)} would be padded to {list(stored)} on this mesh, which "
                f"config.optimizer.name={optimizer.name} cannot update; change config.mesh, or use adamw"
            )


def check_streams(batch_size: int, streams: int) -> None:
    """Raises UserError if the document streams do not fill equal parts of a batch."""
    if batch_size % streams:
        raise UserError(
            f"config.train.batch_size ({batch_size}) is not a multiple of config.data.streams ({streams}); the next "
            f"multiple is {_next_multiple(batch_size, streams)}"
        )


def _check_lora(config: Config, model: Architecture) -> None:
    lora = config.lora
    if not lora.rank:
        return
    if not lora.alpha > 0:  # also rejects NaN
        raise UserError(f"config.lora.alpha is {lora.alpha}; it must be positive (twice config.lora.rank is usual)")
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        raise UserError(
            f"config.lora.targets is {lora.targets!r}; list each projection once, from {', '.join(LORA_TARGETS)}"
        )
    heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outputs = {"q": heads, "k": keys, "v": keys, "out": heads}
    for target in lora.targets:
        if target not in LORA_TARGETS:
            raise UserError(
                f"config.lora.targets has the unknown projection {target!r}; did you mean "
                f"{nearest(target, LORA_TARGETS)!r}? (supported: {', '.join(LORA_TARGETS)})"
            )
        if target == "gate" and not model.gated:
            raise UserError(
                f"config.lora.targets has 'gate', but config.model.mlp {model.mlp!r} has no gate projection; remove it"
            )
        if model.experts and LORA_TARGETS[target] == "mlp":
            raise UserError(
                f"config.lora.targets has {target!r}, but a mixture of {model.experts} experts supports adapters for "
                "attention only; use q, k, v, out"
            )
        largest = min(model.width, outputs.get(target, model.mlp_width))
        if lora.rank > largest:
            raise UserError(
                f"config.lora.rank ({lora.rank}) exceeds the smaller dimension of {target} ({largest}), the highest "
                f"rank of any update to it; set it to {largest} or less"
            )


def _check_mesh(config: Config, model: Architecture) -> None:
    mesh, train, length = config.mesh, config.train, config.data.sequence_length
    if mesh.zero not in (0, 1, 2, 3):
        raise UserError(f"config.mesh.zero is {mesh.zero}; it must be 0, 1, 2 or 3")
    rows = train.accumulate * mesh.replica * mesh.data
    if train.batch_size % rows:
        raise UserError(
            f"config.train.batch_size ({train.batch_size}) is not a multiple of config.train.accumulate "
            f"({train.accumulate}) × config.mesh.replica ({mesh.replica}) × config.mesh.data ({mesh.data}); "
            f"the next multiple is {_next_multiple(train.batch_size, rows)}"
        )
    check_streams(train.batch_size, config.data.streams)
    if train.attention_chunk and length % train.attention_chunk:
        raise UserError(
            f"config.data.sequence_length ({length}) is not a multiple of config.train.attention_chunk "
            f"({train.attention_chunk}); set config.train.attention_chunk to a divisor of {length}, or to 0"
        )
    # The vocabulary is padded to a multiple of the axis; every other dimension sharded over it must divide evenly.
    split = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "model.mlp_width": model.mlp_width}
    for path, size in (split | {"data.sequence_length": length}).items():
        if size % mesh.tensor:
            raise UserError(
                f"config.{path} ({size}) is not divisible by config.mesh.tensor ({mesh.tensor}); "
                f"set config.mesh.tensor to a divisor of {size}"
            )


_MINIMUMS: dict[str, int] = {
    "data.sequence_length": 2,
    "data.shuffle_window": 1,
    "data.streams": 1,
    "lora.rank": 0,
    "mesh.replica": 1,
    "mesh.data": 1,
    "mesh.tensor": 1,
    "train.steps": 1,
    "train.batch_size": 1,
    "train.accumulate": 1,
    "train.loss_chunk": 1,
    "train.attention_chunk": 0,
    "precision.loss_scale": 1,
    "precision.loss_scale_growth": 1,
    "optimizer.warmup_steps": 0,
    "optimizer.decay_steps": 0,
    "optimizer.clip_norm": 0,
    "optimizer.weight_decay": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "eval.every": 0,
    "eval.batches": 1,
    "log.every": 1,
    "log.profile_start": 0,
    "log.profile_steps": 0,
}


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
