"""The train state as the items of a checkpoint, and back on any mesh, ZeRO stage and precision.

Orbax keeps every array whole, in chunks that do not depend on who wrote them, so that other processes and other
shardings read what they need of it. What differs between two layouts beside that:

- Padding. A dimension that does not divide over its mesh axis is stored with zeros at its end. Reading crops or adds
  zeros, which loses nothing: a padding is zero and stays zero through every update.
- Dtypes. Weights are float32, or bfloat16 where the policy stores them so; moments likewise. Reading casts.
- The loss scale, which fp16 alone has. It is an item of its own, so that a checkpoint with it opens without, and one
  without it opens in an fp16 run, which then begins at the scale of its configuration.
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
    """Reads and writes states; all processes of the job call it alike."""
    options = job.orbax_options()
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **{name: ocp.StandardCheckpointHandler(multiprocessing_options=options) for name in _ITEMS},
    )
    return ocp.AsyncCheckpointer(handler, timeout_secs=24 * 60 * 60, multiprocessing_options=options)


def save(orbax: ocp.AsyncCheckpointer, folder: pathlib.Path, state: TrainState) -> None:
    """Starts writing all of a state but what is frozen; the state may be donated as soon as this returns."""
    state = dataclasses.replace(state, frozen=None)
    if jax.default_backend() == "cpu":
        # A CPU array may be written from its own memory, which the next step takes over.
        state = jax.tree.map(jnp.copy, state)
    items = {name: ocp.args.StandardSave(tree) for name, tree in _split(state).items()}
    orbax.save(folder, args=ocp.args.Composite(**items))


def restore(orbax: ocp.AsyncCheckpointer, folder: pathlib.Path, abstract: TrainState, scale: float) -> TrainState:
    """The state in a folder, with the shapes, dtypes and shardings of `abstract`, and nothing that is frozen.

    Args:
      scale: the loss scale to begin with, where `abstract` has one and the folder has not.
    Raises:
      UserError: a folder that this version did not write.
    """
    missing = [name for name in _ITEMS[:3] if not (folder / name).is_dir()]
    if missing:
        raise UserError(
            f"{folder} has no {missing[0]}: a version of jaxllm that kept states otherwise wrote it, and this one can "
            "sample from it but not train it on; start a new run in another --workdir"
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
    """Writes parameters as a state's folder has them; returns when this process's part is on disk."""
    with checkpointer(job) as orbax:
        orbax.save(folder, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
        orbax.wait_until_finished()


def restore_params(folder: pathlib.Path, abstract: Any) -> Any:
    """The parameters in a state's folder, in the shapes, dtypes and shardings of `abstract`.

    Those that have no sharding come to the first device.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), abstract)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        return reader.restore(folder / "params", args=ocp.args.StandardRestore(placed, strict=False))


def _split(state: TrainState) -> dict[str, Any]:
    """Item -> tree. The optimizer's leaves go as a list: its own containers need not be known to read them."""
    items = {
        "params": state.params,
        "opt_state": jax.tree.leaves(state.opt_state),
        "counters": {"step": state.step, "key": state.key},
    }
    if not items["opt_state"]:
        items["opt_state"] = [state.step]  # plain SGD keeps nothing, and Orbax writes no empty tree
    if state.loss_scale is not None:
        items["loss_scale"] = {"scale": state.loss_scale.scale, "good_steps": state.loss_scale.good_steps}
    return items


def _scalar(like: Any, value: float) -> jax.Array:
    return jax.make_array_from_callback((), like.sharding, lambda _: np.asarray(value, like.dtype))
