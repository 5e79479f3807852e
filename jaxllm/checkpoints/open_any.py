"""What a run starts from: initial values of its own, or the weights of a model from the world (config.init_from).

Its architecture and its tokenizer then come with the weights. Both are written into the workdir (the numbers into
config.json, the tokenizer and chat template into tokenizer/), so that resuming and sampling need the model no more.
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
from jaxllm.interop import text as texts
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.text import Text
from jaxllm.model import specs
from jaxllm.parallel.mesh import path_name

# Say nothing of what the weights mean, and are not told, or not alike, by every format.
_APART = ("init_std", "router_aux_weight", "unroll")


class RunInit(NamedTuple):
    """Attributes:
    config: of the run, its model and its tokenizer spelled out.
    text: how the model reads and writes; None where the data are ids already and nothing says.
    source: the model whose weights are to be read; None where the run has initial values of its own, or goes on.
    """

    config: Config
    text: Text | None
    source: Pretrained | None


class Adapters(NamedTuple):
    """The low-rank adapters of a run.

    Attributes:
      model: whose weights they stand beside.
      base: that model, as config.init_from named it.
      load: gives them, float32, without their scale.
    """

    model: Architecture
    lora: LoraConfig
    base: str
    load: Callable[[], Any]


def prepare(config: Config, workdir: pathlib.Path) -> RunInit:
    """How the run in a workdir starts or, if it has a checkpoint, goes on: `config.init_from` is not read then.

    Raises:
      UserError: there is no such model, or `config.model` says it is another; or the workdir is not whole.
    """
    if config.lora.rank and not config.init_from:
        raise UserError(
            f"config.lora.rank is {config.lora.rank} and config.init_from is empty: adapters are trained beside "
            "weights of a model; set config.init_from to it, or config.lora.rank to 0"
        )
    if not config.init_from:
        return RunInit(config, _text(config, None, workdir), None)
    stored = checkpoint.stored_config(workdir)
    if stored is not None:
        base, name = architectures.resolve(stored.model), stored.model.name
        has_own = stored.data.tokenizer == workdir_lib.OWN
        config = _spelled_out(config, base, name, f"the run in {workdir}", has_own)
        return RunInit(config, _text(config, None, workdir), None)
    source = open_any(config.init_from)
    own = texts.of(source)
    config = resolved(config, source)
    return RunInit(config, _text(config, own, workdir), source)


def resolved(config: Config, source: Pretrained | None = None) -> Config:
    """The configuration with the model and the tokenizer of `config.init_from` spelled out; as it is where that is "".

    Args:
      source: the model, where it is open already.
    Raises:
      UserError: there is no such model, or `config.model` says it is another.
    """
    if not config.init_from:
        return config
    source = source or open_any(config.init_from)
    has_own = source.tokenizer is not None
    if not has_own and config.data.tokenizer == "bytes" and config.data.source != "tokens":
        raise UserError(f"{config.init_from} comes with no tokenizer; set config.data.tokenizer to its tokenizer.json")
    return _spelled_out(config, source.model, config.init_from, config.init_from, has_own)


def _spelled_out(config: Config, base: Architecture, name: str, where: str, has_own: bool) -> Config:
    model = architectures.listed(name, agreed(config.model, base, where))
    data = config.data
    if data.tokenizer == "bytes" and has_own:
        data = dataclasses.replace(data, tokenizer=workdir_lib.OWN)
    return dataclasses.replace(config, model=model, data=data)


def agreed(asked: ModelConfig, base: Architecture, where: str) -> Architecture:
    """A model's architecture, with the numbers changed that `config.model` gives beside the name.

    Args:
      asked: as the user wrote it. A name other than the default must be that of the same architecture.
      base: the model's.
      where: the model, for messages.
    Raises:
      UserError: the name is another model's, or a changed number is one that gives a parameter another shape.
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
        reason = f"{path} is {wanted.get(path, 'not there')} in {where}, and would be {shapes.get(path, 'not there')}"
        given = [f"config.model.{name}={changes[name]!r}" for name in changes if changes[name] != getattr(base, name)]
        raise UserError(f"{', '.join(given)}: {reason}; leave config.model alone to take the model as it is")
    if asked.name != ModelConfig().name:
        named = dataclasses.asdict(architectures.resolve(asked))
        other = [
            f for f, value in dataclasses.asdict(made).items() if named[f] != value and f not in (*_APART, *changes)
        ]
        if other:
            told = ", ".join(f"{f} {named[f]!r}, not {getattr(made, f)!r}" for f in other[:3])
            raise UserError(
                f"config.model.name is {asked.name!r} and {where} is another model ({told}); leave config.model.name "
                "out to take the model as it is"
            )
    return made


def _shapes(model: Architecture) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(specs.param_specs(model), is_leaf=specs.is_spec)
    return {path_name(path): list(spec.shape) for path, spec in leaves}


def _text(config: Config, own: Text | None, workdir: pathlib.Path) -> Text | None:
    if config.data.tokenizer == workdir_lib.OWN and own is not None:
        return own
    if config.data.source == "tokens" and config.data.tokenizer != workdir_lib.OWN:
        return None
    return workdir_lib.text(workdir, config)


def open_any(spec: str) -> Pretrained:
    """A model of any kind: a workdir, or what `opening.open_model` opens.

    Raises:
      UserError: there is none.
    """
    path = pathlib.Path(spec).expanduser()
    return open_workdir(path) if (path / "checkpoints").is_dir() else opening.open_model(spec)


def open_adapters(workdir: pathlib.Path) -> Adapters:
    """The adapters of the newest whole checkpoint of a training run.

    Raises:
      UserError: it has none.
    """
    path, config = checkpoint.newest(workdir)
    if not config.lora.rank:
        raise UserError(
            f"the run in {workdir} trains all weights and has no adapters; convert it to safetensors or gguf"
        )
    model = architectures.resolve(config.model)
    return Adapters(model, config.lora, config.init_from, lambda: frozen.read_adapters(path, config, model))


def open_workdir(workdir: pathlib.Path) -> Pretrained:
    """The model of the newest whole checkpoint of a training run, its adapters, if it trains some, in the weights.

    Raises:
      UserError: it has none.
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

    return Pretrained(
        str(workdir),
        model,
        load,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        special=text.special,
        end_ids=text.end_ids,
    )


def _target(array: jax.ShapeDtypeStruct, target: Any) -> jax.ShapeDtypeStruct:
    if isinstance(target, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(target.shape, array.dtype, sharding=target.sharding)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=target)
