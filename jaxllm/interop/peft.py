"""Export and import of LoRA adapters in the folder layout of Hugging Face's PEFT library.

A folder has adapter_config.json and adapter_model.safetensors. A weight W [outputs, inputs] has lora_A [rank, inputs]
and lora_B [outputs, rank]; the adapted weight is W + (lora_alpha / r) · lora_B · lora_A. GPT-2's weights are [inputs,
outputs], and their adapters have the same layout as all others. The names of the weights are those of the model's
Hugging Face folder (`folder_rules`).
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import LORA_TARGETS, Architecture, LoraConfig
from jaxllm.errors import UserError
from jaxllm.interop import rules
from jaxllm.interop.huggingface import config_file, folder_rules
from jaxllm.interop.huggingface.config_fields import read_json
from jaxllm.interop.huggingface.families import FAMILIES
from jaxllm.interop.huggingface.safetensors_files import TensorFiles, read_header, write_file
from jaxllm.interop.pretrained import Pretrained
from jaxllm.model import adapter_specs, adapters
from jaxllm.model.specs import is_spec
from jaxllm.parallel.mesh import path_name

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRICES = {"a": "lora_A", "b": "lora_B"}
# Fields of adapter_config.json that change what adapters compute, and their values for plain LoRA (A and B only).
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False,),
}


def export(folder: pathlib.Path, model: Architecture, lora: LoraConfig, tree: Any, base: str) -> None:
    """Writes adapters as a PEFT folder, in float32.

    Args:
      folder: existing folder to write to.
      model: architecture of the base model.
      lora: rank, alpha and targets of the adapters.
      tree: adapter parameters as in `adapters.adapter_specs`, without the scale.
      base: name of the base model, as given to the training run.
    Raises:
      UserError: no Hugging Face family matches the architecture, or the family fuses a target with other weights in
        one tensor.
    """
    family = config_file.write_config(model)[0]
    locations = _adapter_locations(model, family, lora)
    leaves = {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for module, path, row in locations:
            for half, name in _MATRICES.items():
                x = leaves[f"{path}.{half}"]
                x = x if row is None else x[row]
                flat = x.reshape(-1, lora.rank) if half == "a" else x.reshape(lora.rank, -1)
                yield f"{_PREFIX}{module}.{name}.weight", np.ascontiguousarray(flat.T)

    shapes = {name: tensor.shape for name, tensor in tensors()}
    write_file(folder / TENSORS, shapes, np.dtype(np.float32), tensors())
    targets = sorted({_module_name(module, family) for module, _, _ in locations})
    config = {
        "base_model_name_or_path": base,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "fan_in_fan_out": family == "gpt2",
        "init_lora_weights": True,
        **{name: values[0] for name, values in _PLAIN.items() if name in ("bias", "use_rslora", "use_dora")},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _module_name(module: str, family: str) -> str:
    """Returns the name for `target_modules`: the last component of the path, or the last two if one is ambiguous."""
    return ".".join(module.split(".")[-2 if family == "gpt2" else -1 :])


def _adapter_locations(model: Architecture, family: str, lora: LoraConfig) -> list[tuple[str, str, int | None]]:
    """Lists the adapters as (module, path in the parameter tree, row if the layers are stacked, else None).

    Raises:
      UserError: a target is only a part of a fused module.
    """
    locations = []
    for rule in folder_rules.build_rules(model, family):
        adapted = [path for path in rule.paths if path in {f"{LORA_TARGETS[t]}.{t}" for t in lora.targets}]
        if not adapted or rule.layer is None:
            continue
        module = rule.names[0].removesuffix(".weight")
        if len(rule.paths) > 1:
            parts = ", ".join(path.split(".")[1] for path in rule.paths)
            raise UserError(
                f"{family} stores {parts} in one tensor, {module}, for which PEFT has only one adapter; "
                "convert --to safetensors, which merges the adapters"
            )
        prefix, row = rules.layer_location(model, rule.layer)
        locations.append((module, f"{prefix}.{adapted[0]}", row))
    return locations


def with_adapters(opened: Pretrained, folder: pathlib.Path) -> Pretrained:
    """Returns the model with a loader that merges the adapters of a PEFT folder into its weights, in float32.

    Args:
      opened: the base model.
      folder: the PEFT folder.
    Raises:
      UserError: the folder is missing, or its adapters are of an unsupported kind, belong to another model, or have
        missing or unexpected tensors.
    """
    config, entries = read_json(folder / CONFIG), read_header(folder / TENSORS)
    lora = _read_config(config, folder)
    family = opened.family if opened.family in FAMILIES else config_file.write_config(opened.model)[0]
    modules = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in entries}
    lora = dataclasses.replace(lora, targets=_targets(opened.model, family, modules, folder))
    locations = _adapter_locations(opened.model, family, lora)
    wanted = {f"{_PREFIX}{module}.{half}.weight" for module, _, _ in locations for half in _MATRICES.values()}
    if wanted != entries.keys():
        missing, unexpected = sorted(wanted - entries.keys()), sorted(entries.keys() - wanted)
        lists = {"missing": missing, "unexpected": unexpected}
        parts = [f"{kind}: {', '.join(names[:4])}" for kind, names in lists.items() if names]
        raise UserError(
            f"{folder} does not have one adapter per layer of this model ({'; '.join(parts)}); use adapters that were "
            "trained on this model"
        )
    tree = _read_adapters(opened.model, lora, locations, TensorFiles(entries), folder)

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        weights = opened.load(jnp.float32, shardings)
        return adapters.merged(opened.model, weights, tree, adapters.scale_of(lora), dtype)

    return dataclasses.replace(opened, loader=load)


def _read_config(config: dict[str, Any], folder: pathlib.Path) -> LoraConfig:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; it must be LORA")
    for name, values in _PLAIN.items():
        if config.get(name, values[0]) not in values:
            raise UserError(f"{folder / CONFIG}: {name} = {config[name]!r} is unsupported; it must be {values[0]!r}")
    try:
        return LoraConfig(rank=int(config["r"]), alpha=float(config["lora_alpha"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: r and lora_alpha must be numbers; download it again") from error


def _targets(model: Architecture, family: str, modules: set[str], folder: pathlib.Path) -> tuple[str, ...]:
    found = {
        rule.paths[0].split(".")[1]
        for rule in folder_rules.build_rules(model, family)
        if rule.names[0].removesuffix(".weight") in modules and len(rule.paths) == 1 and rule.layer is not None
    }
    targets = tuple(target for target in LORA_TARGETS if target in found)
    if not targets:
        raise UserError(f"{folder} has no adapters for this model ({family}); use adapters that were trained on it")
    return targets


def _read_adapters(
    model: Architecture,
    lora: LoraConfig,
    locations: list[tuple[str, str, int | None]],
    files: TensorFiles,
    folder: pathlib.Path,
) -> Any:
    """Reads the adapters into the layout of `adapters.adapter_specs`, in float32."""
    declared = adapter_specs.adapter_specs(model, lora)
    leaves = {
        path_name(path): np.empty(spec.shape, np.float32)
        for path, spec in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_spec)
    }
    for module, path, row in locations:
        for half, name in _MATRICES.items():
            tensor = files.read(f"{_PREFIX}{module}.{name}.weight")
            out = leaves[f"{path}.{half}"] if row is None else leaves[f"{path}.{half}"][row]
            if tensor.size != math.prod(out.shape) or lora.rank not in (tensor.shape[0], tensor.shape[-1]):
                raise UserError(
                    f"{folder}: {module}.{name} has shape {list(tensor.shape)}; rank {lora.rank} on this model needs "
                    f"{list(out.shape)}: use adapters that were trained on this model"
                )
            out[...] = tensor.astype(np.float32).T.reshape(out.shape)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(leaves[path_name(path)]), declared, is_leaf=is_spec
    )
