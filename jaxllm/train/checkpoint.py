"""Checkpoints: written in the background, complete or absent, verified before they are used.

A checkpoint is `<workdir>/checkpoints/<step>/`: the state (Orbax), the position in the data, the
configuration, and `manifest.json` with the size and CRC-32 of every other file. It is written under another
name and renamed when whole, so a run killed at any moment leaves either all of it or none. Nothing in it
depends on where it lies: a copied workdir resumes like the original.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxllm import architectures
from jaxllm import config as config_lib
from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.model import specs
from jaxllm.train import manifest
from jaxllm.train.state import TrainState

_STAGING = ".writing-"
# What a full or failing disk raises: Python itself, or TensorStore below Orbax.
_STORAGE_ERRORS = (OSError, ValueError, RuntimeError)
# May differ between a checkpoint and the run that resumes it: none of them changes what an update does,
# but for the number of steps, which stretches the schedule of a run that goes on longer.
_FREE = ("train.steps", "checkpoint.", "eval.", "log.", "ledger.")

Say = Callable[[str], None]


class Restored(NamedTuple):
    state: TrainState
    data_state: dict[str, Any]
    step: int


class Checkpointer:
    """Saves and restores one run's state in its workdir.

    Args:
      workdir: of the run; made where it is missing.
      config: stored in every checkpoint, and compared with the stored one before resuming.
      say: told of checkpoints that are skipped.
    """

    def __init__(self, workdir: pathlib.Path, config: Config, say: Say):
        self._folder = (workdir / "checkpoints").absolute()  # Orbax takes no other
        self._config = config
        self._say = say
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("params", "rest"))
        self._finisher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"{_STAGING}*"):  # of a killed run; never valid
            shutil.rmtree(leftover)

    @property
    def last_good(self) -> str:
        """The newest complete checkpoint, for messages."""
        newest = next(_complete(self._folder), None)
        return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def save(self, step: int, state: TrainState, data_state: dict[str, Any]) -> None:
        """Starts saving. The state may be donated as soon as this returns.

        Raises:
          UserError: the disk cannot hold it, or the save before this one failed.
        """
        self.wait()
        self._check_space(step, state)
        staging, final = self._folder / f"{_STAGING}{step}", self._folder / f"{step:08d}"
        try:
            staging.mkdir(parents=True)
            (staging / "data.json").write_text(json.dumps(data_state))
            (staging / "config.json").write_text(json.dumps(config_lib.to_dict(self._config), indent=1))
            if jax.default_backend() == "cpu":
                # A CPU array may be written from its own memory, which the next step takes over.
                state = jax.tree.map(jnp.copy, state)
            rest = state.replace(params=None)  # type: ignore[attr-defined]
            items = ocp.args.Composite(
                params=ocp.args.StandardSave(state.params), rest=ocp.args.StandardSave(_plain(rest))
            )
            self._orbax.save(staging / "state", args=items)
        except _STORAGE_ERRORS as error:
            raise self._failed(step, staging, error) from error
        self._pending = self._finisher.submit(self._finish, step, staging, final)

    def poll(self) -> None:
        """Raises the error of a save that has failed by now; returns at once."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk, or raises why it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, step: int, staging: pathlib.Path, final: pathlib.Path) -> None:
        try:
            self._orbax.wait_until_finished()
            manifest.write(staging)
            if final.exists():
                manifest.set_aside(final)
            staging.rename(final)
            manifest.sync(self._folder)
        except _STORAGE_ERRORS as error:
            raise self._failed(step, staging, error) from error
        for old in list(_complete(self._folder))[self._config.checkpoint.keep :]:
            shutil.rmtree(old)

    def _check_space(self, step: int, state: TrainState) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise UserError(
                f"cannot save the checkpoint of step {step}: it takes {needed / 2**20:,.1f} MiB and {self._folder} "
                f"has {free / 2**20:,.1f} MiB free; make room and run the same command again; {self.last_good}"
            )

    def _failed(self, step: int, staging: pathlib.Path, error: Exception) -> UserError:
        shutil.rmtree(staging, ignore_errors=True)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return UserError(
            f"cannot save the checkpoint of step {step} in {self._folder}: {reason}; "
            f"mend that and run the same command again; {self.last_good}"
        )

    def restore(self, abstract: TrainState) -> Restored | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        Damaged ones are set aside, with a message; nothing is deleted.

        Args:
          abstract: shapes, dtypes and shardings to restore to.
        Raises:
          UserError: the run in this workdir has another configuration, or every checkpoint is damaged.
        """
        found = False
        for path in _complete(self._folder):
            found = True
            damage = manifest.damage(path)
            if damage:
                self._say(f"skipping checkpoint {path}: {damage}; set aside as {manifest.set_aside(path).name}")
                continue
            check_same_run(json.loads((path / "config.json").read_text()), self._config, path)
            rest = abstract.replace(params=None)  # type: ignore[attr-defined]
            items = ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract.params), rest=ocp.args.StandardRestore(_plain(rest))
            )
            loaded = self._orbax.restore((path / "state").absolute(), args=items)
            leaves = jax.tree.leaves(loaded["rest"])
            state = jax.tree.unflatten(jax.tree.structure(rest), leaves).replace(params=loaded["params"])
            return Restored(state, json.loads((path / "data.json").read_text()), int(path.name))
        if found:
            raise UserError(
                f"every checkpoint in {self._folder} is damaged; they were set aside as *{manifest.DAMAGED}; "
                "run the same command again to start over, or bring back a good copy"
            )
        return None

    def close(self) -> None:
        """Waits for what is being written."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._orbax.close()


def check_same_run(stored: dict[str, Any], config: Config, path: pathlib.Path) -> None:
    """Raises UserError, naming fields, where `config` would not continue the run that stored its own."""
    old = config_lib.field_paths(config_lib.from_dict(stored))
    new = config_lib.field_paths(config)
    changed = [key for key in new if old[key] != new[key] and not key.startswith(_FREE)]
    if changed:
        told = ", ".join(f"config.{key} was {old[key]!r} and is {new[key]!r}" for key in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"{path} belongs to another configuration: {told}{more}; use another --workdir or the old values"
        )


def load_model(workdir: str | os.PathLike[str]) -> tuple[Config, Any]:
    """(configuration, float32 parameter tree) of the newest whole checkpoint of a training run.

    Raises:
      UserError: not a workdir, or none of its checkpoints is whole.
    """
    folder = pathlib.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{workdir} is not the workdir of a training run (it has no checkpoints/); train one first")
    reasons = []
    for path in _complete(folder):
        damage = manifest.damage(path)
        if damage:
            reasons.append(f"{path.name}: {damage}")
            continue
        config = config_lib.from_dict(json.loads((path / "config.json").read_text()))
        abstract = specs.abstract(specs.param_specs(architectures.resolve(config.model)), jnp.float32)
        with ocp.StandardCheckpointer() as reader:
            return config, reader.restore((path / "state" / "params").absolute(), abstract)
    raise UserError(f"{workdir} has no usable checkpoint ({'; '.join(reasons) or 'none was completed'})")


def _plain(tree: Any) -> list[jax.Array]:
    """The leaves as a list: an optimizer's own containers need not be known to read a checkpoint."""
    return jax.tree.leaves(tree)


def _complete(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Checkpoints that were renamed into place, newest first."""
    yield from sorted((p for p in folder.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name), reverse=True)
