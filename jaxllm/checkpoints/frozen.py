"""Frozen weights of a run with low-rank adapters, stored once in its workdir.

They are stored in `<workdir>/frozen/`, written atomically with a manifest like a checkpoint's. Checkpoints then contain
trained weights only, and resuming and sampling do not need the original model.
"""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.checkpoints import arrays, manifest
from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError
from jaxllm.job.distributed import Job
from jaxllm.model import adapter_specs, adapters, specs
from jaxllm.step.state import TrainState

_FOLDER = "frozen"
_STAGING = ".writing-frozen"
_STATE = "state"


def write(workdir: pathlib.Path, weights: Any, job: Job) -> None:
    """Writes the frozen weights and replaces existing ones (of a run without a checkpoint); every process calls it.

    Raises:
      UserError: writing fails, for instance because the disk is full.
    """
    folder, staging = (workdir / name for name in (_FOLDER, _STAGING))
    folder, staging = folder.absolute(), staging.absolute()  # Orbax requires absolute paths
    try:
        if job.is_leader:
            for leftover in (folder, staging):
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir(parents=True)
        job.barrier("frozen-begun")
        arrays.save_params(job, staging / _STATE, weights)
        job.barrier("frozen-written")
        files = job.gather("frozen-files", manifest.fingerprints(staging, job.index, job.count))
        if job.is_leader:
            manifest.write(staging, {name: file for part in files for name, file in part.items()})
            staging.rename(folder)
            manifest.sync(workdir)
        job.barrier("frozen-done")
    except OSError as error:
        needed = sum(x.nbytes for x in jax.tree.leaves(weights)) / 2**20
        raise UserError(
            f"cannot write the frozen weights ({needed:,.1f} MiB) to {folder} ({error.strerror or error}); free some "
            "disk space and run the same command again"
        ) from error


def attach(state: TrainState, abstract: TrainState, workdir: pathlib.Path, job: Job) -> TrainState:
    """Returns a restored state with its frozen weights added; unchanged if the run has none.

    Args:
      state: the restored state.
      abstract: shapes, dtypes and shardings of the state with frozen weights.
      workdir: directory of the run.
      job: processes of the run.
    Raises:
      UserError: the frozen weights are missing or damaged.
    """
    if abstract.frozen is None:
        return state
    damage = job.broadcast("frozen", lambda: _find_damage(workdir))
    if damage:
        raise UserError(damage)
    return dataclasses.replace(state, frozen=_read(workdir, abstract.frozen))


def merged_model(
    workdir: pathlib.Path, checkpoint: pathlib.Path, config: Config, model: Architecture, targets: Any
) -> Any:
    """Returns the model parameters with the adapters merged in: W + scale · A·B, computed in float32.

    Used for sampling and conversion: merged weights cost nothing per token, and every format supports them.

    Args:
      workdir: directory of the run.
      checkpoint: a verified checkpoint in it.
      config: configuration of the run.
      model: its architecture.
      targets: tree of `jax.ShapeDtypeStruct` like the parameters, padded or not, with or without shardings.
    Raises:
      UserError: the frozen weights are missing or damaged.
    """
    damage = _find_damage(workdir)
    if damage:
        raise UserError(damage)
    beside = jax.tree.leaves(targets)[0].sharding
    everywhere = NamedSharding(beside.mesh, PartitionSpec()) if isinstance(beside, NamedSharding) else beside
    declared = adapter_specs.trained_specs(model, config.lora)
    wanted = specs.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=everywhere), declared)
    pairs = arrays.restore_params((checkpoint / _STATE).absolute(), wanted)
    # Stored weights may have more precision than the targets: add in float32, and cast afterwards.
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), targets)
    weights = _read(workdir, wide)
    made = adapters.merged(model, weights, pairs, adapters.scale_of(config.lora), jnp.float32)
    return jax.tree.map(lambda x, to: jax.device_put(x.astype(to.dtype), to.sharding), made, targets)


def read_adapters(checkpoint: pathlib.Path, config: Config, model: Architecture) -> Any:
    """Reads the adapters (A and B) in a checkpoint as float32, without the scale alpha / rank applied."""
    declared = adapter_specs.adapter_specs(model, config.lora)
    return arrays.restore_params((checkpoint / _STATE).absolute(), specs.abstract(declared, jnp.float32))


def _read(workdir: pathlib.Path, abstract: Any) -> Any:
    return arrays.restore_params((workdir / _FOLDER / _STATE).absolute(), abstract)


def _find_damage(workdir: pathlib.Path) -> str:
    """Returns a message with the damage to the frozen weights and the fix; "" if they are intact."""
    folder = workdir / _FOLDER
    damage = manifest.find_damage(folder) if folder.is_dir() else "the folder is missing"
    if not damage:
        return ""
    return (
        f"cannot read the frozen base weights of this run in {folder}: {damage}; restore a good copy, or start again "
        "in another --workdir"
    )
