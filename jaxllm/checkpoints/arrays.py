"""Saves the train state with Orbax and restores it on any mesh, ZeRO stage and precision.

Orbax stores each array as a global array, in chunks that do not depend on the writing processes, so that other
processes and shardings can read the parts they need. Three other things differ between layouts:

- Padding. A dimension that does not divide evenly over its mesh axis is stored with zeros at its end. Restoring crops
  or adds zeros. This is lossless, because padding is zero and stays zero through every update.
- Dtypes. Weights and moments are float32, or bfloat16 if the policy stores them so. Restoring casts.
- Loss scale, used by fp16 only. It is a separate item. A run of another precision ignores it, and an fp16 run that
  restores a checkpoint without it starts from the configured scale.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxllm.errors import UserError
from jaxllm.job.distributed import Job
from jaxllm.step.state import LossScale, TrainState

_ITEMS = ("params", "opt_state", "counters", "loss_scale")


def checkpointer(job: Job) -> ocp.AsyncCheckpointer:
    """Creates the Orbax checkpointer for train states; all processes of the job must call it."""
    options = job.orbax_options()
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **{name: ocp.StandardCheckpointHandler(multiprocessing_options=options) for name in _ITEMS},
    )
    return ocp.AsyncCheckpointer(handler, timeout_secs=24 * 60 * 60, multiprocessing_options=options)


def save(orbax: ocp.AsyncCheckpointer, folder: pathlib.Path, state: TrainState) -> None:
    """Starts writing a state without its frozen weights; the state may be donated as soon as this returns."""
    state = dataclasses.replace(state, frozen=None)
    if jax.default_backend() == "cpu":
        # On CPU, Orbax may write from the array's own buffer, which the next step reuses (donation).
        state = jax.tree.map(jnp.copy, state)
    items = {name: ocp.args.StandardSave(tree) for name, tree in _split(state).items()}
    orbax.save(folder, args=ocp.args.Composite(**items))


def restore(orbax: ocp.AsyncCheckpointer, folder: pathlib.Path, abstract: TrainState, scale: float) -> TrainState:
    """Restores the state in a folder, without frozen weights.

    Args:
      orbax: the result of `checkpointer`.
      folder: folder that `save` has written.
      abstract: shapes, dtypes and shardings to restore to.
      scale: initial loss scale, used if `abstract` has one and the folder has none.
    Raises:
      UserError: an incompatible version of jaxllm wrote the folder.
    """
    missing = [name for name in _ITEMS[:3] if not (folder / name).is_dir()]
    if missing:
        raise UserError(
            f"{folder} has no {missing[0]}: an incompatible version of jaxllm wrote it, and this version can sample "
            "from it but not resume training; start a new run in another --workdir"
        )
    wanted = _split(abstract)
    made = None
    if abstract.loss_scale is not None and not (folder / "loss_scale").is_dir():
        del wanted["loss_scale"]
        made = LossScale(_scalar(abstract.loss_scale.scale, scale), _scalar(abstract.loss_scale.good_steps, 0))
    items = {name: ocp.args.StandardRestore(tree, strict=False) for name, tree in wanted.items()}
    loaded = orbax.restore(folder, args=ocp.args.Composite(**items))
    structure: Any = jax.tree.structure(abstract.opt_state)
    loss_scale = LossScale(**loaded["loss_scale"]) if "loss_scale" in wanted else made
    return TrainState(
        step=loaded["counters"]["step"],
        params=loaded["params"],
        opt_state=jax.tree.unflatten(structure, jax.tree.leaves(loaded["opt_state"])[: structure.num_leaves]),
        key=loaded["counters"]["key"],
        loss_scale=loss_scale,
    )


def save_params(job: Job, folder: pathlib.Path, params: Any) -> None:
    """Writes parameters in the layout of a state's folder; returns when this process's part is on disk."""
    with checkpointer(job) as orbax:
        orbax.save(folder, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
        orbax.wait_until_finished()


def restore_params(folder: pathlib.Path, abstract: Any) -> Any:
    """Restores the parameters in a state's folder to the shapes, dtypes and shardings of `abstract`.

    Parameters without a sharding are placed on the first local device.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), abstract)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        return reader.restore(folder / "params", args=ocp.args.StandardRestore(placed, strict=False))


def _split(state: TrainState) -> dict[str, Any]:
    """Returns {item: tree} for a state.

    The optimizer state is stored as a list of leaves, so that it can be read without the optimizer's container types.
    """
    items = {
        "params": state.params,
        "opt_state": jax.tree.leaves(state.opt_state),
        "counters": {"step": state.step, "key": state.key},
    }
    if not items["opt_state"]:
        items["opt_state"] = [state.step]  # plain SGD has no state, and Orbax does not write empty trees
    if state.loss_scale is not None:
        items["loss_scale"] = {"scale": state.loss_scale.scale, "good_steps": state.loss_scale.good_steps}
    return items


def _scalar(like: Any, value: float) -> jax.Array:
    return jax.make_array_from_callback((), like.sharding, lambda _: np.asarray(value, like.dtype))
