"""Checkpoints: written in the background, complete or absent, verified before they are used.

A checkpoint is `<workdir>/checkpoints/<step>/`: the state (Orbax; of a run with adapters without the frozen weights,
which no step changes and `jaxllm.checkpoints.frozen` keeps once), the place in each stream of the data, the
configuration, and `manifest.json` with the size and CRC-32 of every other file. It is written under another
name and renamed when whole, so a run killed at any moment leaves either all of it or none. Nothing in it
depends on where it lies: a copied workdir resumes like the original.

In a job of many processes each writes its shares of the arrays and the places of its own streams; process 0 makes
the folder, the manifest and the one rename, after all have finished. They wait for one another in the coordination
service (`Job.barrier`) and never through the devices, which may be in the middle of a step.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxllm.checkpoints import arrays, manifest
from jaxllm.config import Config, overrides
from jaxllm.errors import UserError
from jaxllm.job.distributed import Job
from jaxllm.step.state import TrainState

_STAGING = ".writing-"
# What a full or failing disk raises: Python itself, or TensorStore below Orbax.
_STORAGE_ERRORS = (OSError, ValueError, RuntimeError)
# May differ between a checkpoint and the run that resumes it: none of them changes what an update does beyond
# rounding, but for the number of steps, which stretches the schedule of a run that goes on longer.
_FREE = (
    *("train.steps", "train.accumulate", "train.loss_chunk", "train.attention_chunk"),
    *("optimizer.offload", "optimizer.moment_dtype"),
    *("mesh.", "attention.", "remat.", "precision.", "checkpoint.", "eval.", "log.", "ledger."),
    "init_from",  # read once, before the first step
)

Say = Callable[[str], None]


class Restored(NamedTuple):
    state: TrainState
    data_state: dict[str, Any]
    step: int


class Checkpointer:
    """Saves and restores one run's state in its workdir. Every process of a job has one, and all call it alike.

    Args:
      workdir: of the run; made where it is missing.
      config: stored in every checkpoint, and compared with the stored one before resuming.
      say: told of checkpoints that are skipped.
      job: whose processes share the workdir.
    """

    def __init__(self, workdir: pathlib.Path, config: Config, say: Say, job: Job | None = None):
        self._folder = (workdir / "checkpoints").absolute()  # Orbax takes no other
        self._config = config
        self._say = say
        self._job = job or Job()
        self._orbax = arrays.checkpointer(self._job)
        self._finisher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        if self._job.leads:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(f"{_STAGING}*"):  # of a killed run; never valid
                shutil.rmtree(leftover)

    @property
    def last_good(self) -> str:
        """The newest complete checkpoint, for messages."""
        newest = next(_complete(self._folder), None)
        return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def save(self, step: int, state: TrainState, data_state: dict[str, Any], streams: Iterable[str] = ()) -> None:
        """Starts saving. The state may be donated as soon as this returns.

        Args:
          step: batches trained on.
          data_state: stream -> place.
          streams: those of `data_state` that this process writes; all of them where it is alone.
        Raises:
          UserError: the disk cannot hold it, or the save before this one failed.
        """
        self.wait()
        staging = self._folder / f"{_STAGING}{step}"
        try:
            if self._job.leads:
                self._check_space(step, state)
                (staging / "data").mkdir(parents=True)
                (staging / "config.json").write_text(json.dumps(overrides.to_dict(self._config), indent=1))
            self._job.barrier(f"save-{step}-begun")
            for stream in data_state if self._job.is_alone else streams:
                (staging / "data" / f"{stream}.json").write_text(json.dumps(data_state[stream]))
            arrays.save(self._orbax, staging / "state", state)
        except _STORAGE_ERRORS as error:
            if self._is_of_the_job(error):
                raise
            raise self._failed(step, staging, error) from error
        self._pending = self._finisher.submit(self._finish, step, staging)

    def poll(self) -> None:
        """Raises the error of a save that has failed by now; returns at once."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk, or raises why it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, step: int, staging: pathlib.Path) -> None:
        job, final = self._job, self._folder / f"{step:08d}"
        try:
            self._orbax.wait_until_finished()
            job.barrier(f"save-{step}-written")
            files = job.gather(f"save-{step}-files", manifest.fingerprints(staging, job.index, job.count))
            if job.leads:
                manifest.write(staging, {name: file for part in files for name, file in part.items()})
                if final.exists():
                    manifest.set_aside(final)
                staging.rename(final)
                manifest.sync(self._folder)
            job.barrier(f"save-{step}-done")
        except _STORAGE_ERRORS as error:
            if self._is_of_the_job(error):
                raise
            raise self._failed(step, staging, error) from error
        if job.leads:
            for old in list(_complete(self._folder))[self._config.checkpoint.keep :]:
                shutil.rmtree(old)

    def _is_of_the_job(self, error: BaseException) -> bool:
        """Whether waiting for the other processes failed, and not the disk."""
        causes = (error, error.__cause__)
        return not self._job.is_alone and any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes)

    def _check_space(self, step: int, state: TrainState) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(dataclasses.replace(state, frozen=None)))
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
        """The newest checkpoint that is whole, or None where there is none at all; the same one in every process.

        Damaged ones are set aside, with a message; nothing is deleted.

        Args:
          abstract: shapes, dtypes and shardings to restore to; any mesh, ZeRO stage and precision will do.
        Raises:
          UserError: the run in this workdir has another configuration, or every checkpoint is damaged.
        """
        name = self._job.decide("restore", self._newest_whole)
        if name is None:
            return None
        path = self._folder / name
        if not path.is_dir():
            raise UserError(
                f"process {self._job.index} does not see {path}, which process 0 does; put --workdir on a disk that "
                "all machines share"
            )
        state = arrays.restore(self._orbax, path / "state", abstract, self._config.precision.loss_scale)
        places = {file.stem: json.loads(file.read_text()) for file in (path / "data").glob("*.json")}
        return Restored(state, places, int(name))

    def _newest_whole(self) -> str | None:
        found = False
        for path in _complete(self._folder):
            found = True
            damage = manifest.damage(path)
            if damage:
                self._say(f"skipping checkpoint {path}: {damage}; set aside as {manifest.set_aside(path).name}")
                continue
            check_same_run(json.loads((path / "config.json").read_text()), self._config, path)
            return path.name
        if found:
            raise UserError(
                f"every checkpoint in {self._folder} is damaged; they were set aside as *{manifest.DAMAGED}; "
                "run the same command again to start over, or bring back a good copy"
            )
        return None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for what is being written; but not where a job has failed, as those it waits for may be gone."""
        if kind is None or self._job.is_alone:
            self.close()

    def close(self) -> None:
        """Waits for what is being written."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._orbax.close()


def check_same_run(stored: dict[str, Any], config: Config, path: pathlib.Path) -> None:
    """Raises UserError, naming fields, where `config` would not continue the run that stored its own."""
    old = overrides.field_paths(overrides.from_dict(stored))
    new = overrides.field_paths(config)
    changed = [key for key in new if old[key] != new[key] and not key.startswith(_FREE)]
    if changed:
        told = ", ".join(f"config.{key} was {old[key]!r} and is {new[key]!r}" for key in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"{path} belongs to another configuration: {told}{more}; use another --workdir or the old values"
        )


def newest(workdir: str | os.PathLike[str]) -> tuple[pathlib.Path, Config]:
    """(folder, configuration) of the newest whole checkpoint of a training run.

    Raises:
      UserError: not a workdir, or none of its checkpoints is whole.
    """
    folder = pathlib.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{workdir} is not the workdir of a training run (it has no checkpoints/); train one first")
    reasons = []
    for path in _complete(folder):
        damage = manifest.damage(path)
        if not damage:
            return path, _config_in(path)
        reasons.append(f"{path.name}: {damage}")
    raise UserError(f"{workdir} has no usable checkpoint ({'; '.join(reasons) or 'none was completed'})")


def stored_config(workdir: pathlib.Path) -> Config | None:
    """The configuration that the run in a workdir goes on with; None where it has no checkpoint, damaged or not."""
    for path in _complete(workdir / "checkpoints"):
        try:
            return _config_in(path)
        except (OSError, ValueError):  # damaged; told when it is restored
            continue
    return None


def _config_in(checkpoint: pathlib.Path) -> Config:
    return overrides.from_dict(json.loads((checkpoint / "config.json").read_text()))


def _complete(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Checkpoints that were renamed into place, newest first."""
    yield from sorted((p for p in folder.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name), reverse=True)
