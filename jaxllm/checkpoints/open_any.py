"""Resolves the starting point of a run, random initialization or a pretrained model, and opens models of any kind.

With config.init_from, the architecture and the tokenizer come from the pretrained model. Both are written to the
workdir (the hyperparameters to config.json, the tokenizer and chat template to tokenizer/), so that resuming and
sampling do not need the pretrained model.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxllm import architectures
from jaxllm.checkpoints import arrays, checkpoint, frozen
from jaxllm.checkpoints import workdir as workdir_lib
from jaxllm.config import Architecture, Config, LoraConfig, ModelConfig
from jaxllm.errors import UserError
from jaxllm.interop import opening
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.model import specs
from jaxllm.parallel.mesh import path_name

# Fields that do not affect the meaning of the weights; formats omit them or disagree on them.
_IGNORED_FIELDS = ("init_std", "router_aux_weight", "unroll")


class RunInit(NamedTuple):
    """Starting point of a run.

    Attributes:
      config: configuration with the model and the tokenizer resolved.
      text: tokenizer and chat template; None if the data are token ids and no tokenizer is given.
      source: the model whose weights are loaded; None if the run starts from random weights or resumes.
    """

    config: Config
    text: Text | None
    source: Pretrained | None


class Adapters(NamedTuple):
    """Low-rank adapters of a training run.

    Attributes:
      model: architecture of the base model.
      lora: rank, alpha and targets of the adapters.
      base: the base model, as named in config.init_from.
      load: returns the adapters as float32, without the scale alpha / rank applied.
    """

    model: Architecture
    lora: LoraConfig
    base: str
    load: Callable[[], Any]


def prepare(config: Config, workdir: pathlib.Path) -> RunInit:
    """Resolves how the run in a workdir starts or, if it has a checkpoint, resumes without reading `config.init_from`.

    Raises:
      UserError: the model does not exist, `config.model` contradicts it, or files are missing from the workdir.
    """
    if config.lora.rank and not config.init_from:
        raise UserError(
            f"config.lora.rank is {config.lora.rank}, but config.init_from is empty: adapters need a pretrained model; "
            "set config.init_from to one, or config.lora.rank to 0"
        )
    if not config.init_from:
        return RunInit(config, _text(config, Text(), workdir), None)
    stored = checkpoint.stored_config(workdir)
    if stored is not None:
        base, name = architectures.resolve(stored.model), stored.model.name
        has_own = stored.data.tokenizer == workdir_lib.OWN_FILES
        config = _with_model(config, base, name, f"the run in {workdir}", has_own)
        return RunInit(config, _text(config, Text(), workdir), None)
    source = open_any(config.init_from)
    config = resolved(config, source)
    return RunInit(config, _text(config, source.text, workdir), source)


def resolved(config: Config, source: Pretrained | None = None) -> Config:
    """Returns the configuration with the model and tokenizer of `config.init_from` filled in; unchanged if that is "".

    Args:
      config: the configuration as the user wrote it.
      source: the model of `config.init_from`, if it is already open.
    Raises:
      UserError: the model does not exist, it has no tokenizer and none is set, or `config.model` contradicts it.
    """
    if not config.init_from:
        return config
    source = source or open_any(config.init_from)
    tokenizer = source.text.tokenizer
    if tokenizer is None and config.data.tokenizer == "bytes" and config.data.source != "tokens":
        raise UserError(f"{config.init_from} has no tokenizer; set config.data.tokenizer to its tokenizer.json")
    # A byte tokenizer has no file of its own: "bytes" already means it.
    has_own = tokenizer is not None and not isinstance(tokenizer, ByteTokenizer)
    return _with_model(config, source.model, config.init_from, config.init_from, has_own)


def _with_model(config: Config, base: Architecture, name: str, where: str, has_own: bool) -> Config:
    model = architectures.explicit_config(name, apply_overrides(config.model, base, where))
    data = config.data
    if data.tokenizer == "bytes" and has_own:
        data = dataclasses.replace(data, tokenizer=workdir_lib.OWN_FILES)
    return dataclasses.replace(config, model=model, data=data)


def apply_overrides(asked: ModelConfig, base: Architecture, where: str) -> Architecture:
    """Returns the architecture of a model with the overrides in `config.model` applied.

    Args:
      asked: `config.model` as the user wrote it. A name other than the default must name the same architecture.
      base: architecture of the model.
      where: description of the model, for messages.
    Raises:
      UserError: the name is that of another architecture, or an override changes the shape of a parameter.
    """
    changes = {
        field.name: getattr(asked, field.name)
        for field in dataclasses.fields(Architecture)
        if getattr(asked, field.name) is not None
    }
    made = dataclasses.replace(base, **changes)
    shapes, wanted = _shapes(made), _shapes(base)
    if shapes != wanted:
        path = next(path for path in {**wanted, **shapes} if shapes.get(path) != wanted.get(path))
        reason = f"{path} is {wanted.get(path, 'absent')} in {where}, but would be {shapes.get(path, 'absent')}"
        given = [f"config.model.{name}={changes[name]!r}" for name in changes if changes[name] != getattr(base, name)]
        raise UserError(f"{', '.join(given)}: {reason}; leave config.model unset to use the model as it is")
    if asked.name != ModelConfig().name:
        named = dataclasses.asdict(architectures.resolve(asked))
        found = dataclasses.asdict(made)
        differing = [f for f in found if named[f] != found[f] and f not in (*_IGNORED_FIELDS, *changes)]
        if differing:
            listed = ", ".join(f"{f} is {found[f]!r}, not {named[f]!r}" for f in differing[:3])
            raise UserError(
                f"config.model.name is {asked.name!r}, but {where} is another model ({listed}); leave "
                "config.model.name unset to use the model as it is"
            )
    return made


def _shapes(model: Architecture) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(specs.param_specs(model), is_leaf=specs.is_spec)
    return {path_name(path): list(spec.shape) for path, spec in leaves}


def _text(config: Config, own: Text, workdir: pathlib.Path) -> Text | None:
    if config.data.tokenizer == workdir_lib.OWN_FILES and own.tokenizer is not None:
        return own
    if config.data.source == "tokens" and config.data.tokenizer != workdir_lib.OWN_FILES:
        return None
    return workdir_lib.text(workdir, config)


def open_any(spec: str) -> Pretrained:
    """Opens a model of any kind: a workdir, or anything that `opening.open_model` supports.

    Raises:
      UserError: no such model is found.
    """
    path = pathlib.Path(spec).expanduser()
    return open_workdir(path) if (path / "checkpoints").is_dir() else opening.open_model(spec)


def open_adapters(workdir: pathlib.Path) -> Adapters:
    """Opens the adapters in the newest intact checkpoint of a training run.

    Raises:
      UserError: the run has no intact checkpoint, or no adapters.
    """
    path, config = checkpoint.newest(workdir)
    if not config.lora.rank:
        raise UserError(
            f"the run in {workdir} trained all weights and has no adapters; use --to=safetensors or --to=gguf"
        )
    model = architectures.resolve(config.model)
    return Adapters(model, config.lora, config.init_from, lambda: frozen.read_adapters(path, config, model))


def open_workdir(workdir: pathlib.Path) -> Pretrained:
    """Opens the model in the newest intact checkpoint of a training run, with any adapters merged into the weights.

    Raises:
      UserError: the run has no intact checkpoint.
    """
    path, config = checkpoint.newest(workdir)
    model = architectures.resolve(config.model)
    text = workdir_lib.text(workdir, config)

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        targets = specs.abstract(specs.param_specs(model), dtype)
        if shardings is not None:
            targets = jax.tree.map(_target, targets, shardings)
        if config.lora.rank:
            return frozen.merged_model(workdir, path, config, model, targets)
        return arrays.restore_params((path / "state").absolute(), targets)

    return Pretrained(str(workdir), model, load, text=text)


def _target(array: jax.ShapeDtypeStruct, target: Any) -> jax.ShapeDtypeStruct:
    if isinstance(target, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(target.shape, array.dtype, sharding=target.sharding)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=target)
