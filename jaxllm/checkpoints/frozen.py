"""The weights that a run with low-rank adapters does not train: written once into its workdir, beside the checkpoints.

They lie in `<workdir>/frozen/`, with a manifest like a checkpoint's, complete or absent. So checkpoints are as small as
what is trained, and resuming and sampling need the model that the run started from no more.
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
    """Writes them, in the place of those of a run that never came to a checkpoint. Every process calls it alike.

    Raises:
      UserError: the disk cannot hold them.
    """
    folder, staging = (workdir / name for name in (_FOLDER, _STAGING))
    folder, staging = folder.absolute(), staging.absolute()  # Orbax takes no other
    try:
        if job.leads:
            for leftover in (folder, staging):
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir(parents=True)
        job.barrier("frozen-begun")
        arrays.save_params(job, staging / _STATE, weights)
        job.barrier("frozen-written")
        files = job.gather("frozen-files", manifest.fingerprints(staging, job.index, job.count))
        if job.leads:
            manifest.write(staging, {name: file for part in files for name, file in part.items()})
            staging.rename(folder)
            manifest.sync(workdir)
        job.barrier("frozen-done")
    except OSError as error:
        needed = sum(x.nbytes for x in jax.tree.leaves(weights)) / 2**20
        raise UserError(
            f"cannot write the frozen weights ({needed:,.1f} MiB) into {folder} ({error.strerror or error}); make room "
            "and run the same command again"
        ) from error


def attached(state: TrainState, abstract: TrainState, workdir: pathlib.Path, job: Job) -> TrainState:
    """A restored state with the frozen weights that belong to it; as it is where there are none.

    Args:
      abstract: shapes, dtypes and shardings of the whole state.
    Raises:
      UserError: they are not there, or not whole.
    """
    if abstract.frozen is None:
        return state
    damage = job.decide("frozen", lambda: _damage(workdir))
    if damage:
        raise UserError(damage)
    return dataclasses.replace(state, frozen=_read(workdir, abstract.frozen))


def merged_model(
    workdir: pathlib.Path, checkpoint: pathlib.Path, config: Config, model: Architecture, targets: Any
) -> Any:
    """The parameter tree of the model that a run with adapters has made: W + scale · A·B, added in float32.

    Sampling and converting take it: it costs nothing at each token, and any format can hold it.

    Args:
      checkpoint: of the workdir, verified.
      targets: tree of `jax.ShapeDtypeStruct`s like the parameters, padded or not, with shardings or without.
    Raises:
      UserError: the frozen weights are not there, or not whole.
    """
    damage = _damage(workdir)
    if damage:
        raise UserError(damage)
    beside = jax.tree.leaves(targets)[0].sharding
    everywhere = NamedSharding(beside.mesh, PartitionSpec()) if isinstance(beside, NamedSharding) else beside
    declared = adapter_specs.trained_specs(model, config.lora)
    wanted = specs.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=everywhere), declared)
    pairs = arrays.restore_params((checkpoint / _STATE).absolute(), wanted)
    # Stored weights may be wider than what is asked for: what is added is added to all of their digits.
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), targets)
    weights = _read(workdir, wide)
    made = adapters.merged(model, weights, pairs, adapters.scale_of(config.lora), jnp.float32)
    return jax.tree.map(lambda x, to: jax.device_put(x.astype(to.dtype), to.sharding), made, targets)


def read_adapters(checkpoint: pathlib.Path, config: Config, model: Architecture) -> Any:
    """The adapters in a checkpoint, float32, without their scale."""
    declared = adapter_specs.adapter_specs(model, config.lora)
    return arrays.restore_params((checkpoint / _STATE).absolute(), specs.abstract(declared, jnp.float32))


def _read(workdir: pathlib.Path, abstract: Any) -> Any:
    return arrays.restore_params((workdir / _FOLDER / _STATE).absolute(), abstract)


def _damage(workdir: pathlib.Path) -> str:
    """What is wrong, and what to do about it; "" where nothing is."""
    folder = workdir / _FOLDER
    damage = manifest.damage(folder) if folder.is_dir() else "it is missing"
    if not damage:
        return ""
    return (
        f"{folder}, the weights that the adapters of this run stand beside: {damage}; bring back a good copy of it, or "
        "start again in another --workdir"
    )
