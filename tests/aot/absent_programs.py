"""Programs compiled in this process for absent devices; each program is compiled once per session.

found = absent_programs.train_step(config, "h100")      # as many devices as config.mesh takes
found.figures["arguments"], found.collectives, found.matmul_counts, found.text
"""

import dataclasses
import functools
import json
import math
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

from jaxllm import architectures
from jaxllm import config as config_lib
from jaxllm.config import Config, overrides
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, collectives, hlo, inspection, matmuls
from jaxllm.ledger.compiled.collectives import Collective
from jaxllm.ledger.compiled.inspection import task_programs
from jaxllm.ledger.compiled.matmuls import Matmuls
from jaxllm.ledger.rows import Unknown
from jaxllm.parallel import mesh


@dataclasses.dataclass(frozen=True)
class Found:
    """A compiled program: its abstract inputs, memory figures and optimized HLO.

    Attributes:
      inputs: abstract arguments, as passed to the compiler.
      figures: result of `ledger.compiled.inspection.figures`.
      text: optimized HLO.
    """

    inputs: tuple[Any, ...]
    figures: dict[str, Any]
    text: str

    @functools.cached_property
    def module(self) -> hlo.Module:
        return hlo.parse(self.text)

    @functools.cached_property
    def collectives(self) -> Sequence[Collective]:
        return collectives.collectives(self.module)

    @functools.cached_property
    def matmul_counts(self) -> Matmuls:
        return matmuls.count_matmuls(self.module)

    def volume(self, *ops: str) -> int:
        """Returns the elements that one device sends in collectives of these operations, by the ZeRO paper's count."""
        return sum(c.volume for c in self.collectives if c.op in ops)


def train_step(config: Config, device: str, quick: bool = False) -> Found:
    """Compiles a training step for as many of these devices as config.mesh takes.

    Args:
      config: the run.
      device: name of the device, as in `hardware.detect.by_name`.
      quick: make a TPU's compiler spend little effort. Collectives, donation and arguments stay the same,
        in a fifth of the time; temporaries do not, so they are Unknown.
    """
    quick = quick and detect.by_name(device).platform == "tpu"  # a GPU's programs are the same, and compiled once
    return _train_step(json.dumps(overrides.to_dict(config), sort_keys=True), device, quick)


@functools.cache
def _train_step(config_json: str, name: str, quick: bool) -> Found:
    config = overrides.from_dict(json.loads(config_json))
    device = detect.by_name(name)
    model = architectures.resolve_config(config)
    program = task_programs(config, model, device.platform, absent.abstract_mesh(config), None)["train_step"]
    count = math.prod(mesh.axis_sizes(config.mesh).values())
    target = absent.require_compiler(device.name, device.compile_target)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if target.platform == "tpu":
            options = {"xla_dump_to": folder, "xla_dump_hlo_module_re": ".*"}
            options |= {"exec_time_optimization_effort": -1.0} if quick else {}
        executable = absent.compile_for(program, target, count, options)
        # A TPU's own memory analysis is unusable where arguments are donated; see `inspection.tpu_figures`.
        figures = inspection.figures(executable) | inspection.tpu_figures(pathlib.Path(folder))
    if options.get("exec_time_optimization_effort"):
        figures |= dict.fromkeys(("temps", "peak"), Unknown("compiled with little effort"))
    return Found(program.inputs, figures, executable.as_text())


def bytes_per_device(inputs: Any) -> int:
    """Returns the bytes per device of abstract arrays with shardings, from their shard shapes."""
    leaves = jax.tree.leaves(inputs)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def quickstart(**fields: Any) -> Config:
    """Returns a quickstart-sized run on 8 devices with a plain optimizer; `fields` are `section_field=value`."""
    config = Config()
    model = config.model
    model.name, model.rope_scaling = "llama3.2-1b", "none"
    model.vocab_size, model.layers, model.width, model.mlp_width = 257, 4, 128, 384
    model.heads, model.kv_heads, model.head_dim, model.context_length = 4, 2, 32, 512
    config.data.sequence_length, config.train.batch_size, config.mesh.data = 256, 16, 8
    for name, value in fields.items():
        section, field = name.split("_", 1)
        assert hasattr(getattr(config, section), field), name
        setattr(getattr(config, section), field, value)
    return config


def llama3_8b(**fields: Any) -> Config:
    """Returns Llama 3 8B on 8 devices, one sequence of 2,048 tokens each, with full recomputation of its blocks."""
    config = quickstart(
        data_sequence_length=2048, train_batch_size=8, remat_policy="full", train_loss_chunk=2048, **fields
    )
    config.model = config_lib.ModelConfig(name="llama3-8b")
    return config
