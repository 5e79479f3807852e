"""Checkpoints of a run: written in the background, atomic, and verified before use.

A checkpoint is the folder `<workdir>/checkpoints/<step>/`. It contains the state (Orbax), the position in each data
stream, the configuration, and `manifest.json` with the size and CRC-32 of every other file. Frozen weights of a run
with adapters are not included: `jaxllm.checkpoints.frozen` stores them once. The folder is written under another name
and renamed when complete, so a run killed at any time leaves a complete checkpoint or none. No file contains the
location: a copied workdir resumes like the original.

In a job of many processes each writes its shards of the arrays and the positions of its own streams. Process 0 creates
the folder, the manifest and the one rename, after all have finished. Processes synchronize through the coordination
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
# Exceptions raised for a full or failing disk, by Python or by TensorStore below Orbax.
_STORAGE_ERRORS = (OSError, ValueError, RuntimeError)
# Fields that may differ between a checkpoint and the run that resumes it. They change an update by rounding only,
# except train.steps, which stretches the learning-rate schedule.
_MAY_DIFFER = (
    *("train.steps", "train.accumulate", "train.loss_chunk", "train.attention_chunk"),
    *("optimizer.offload", "optimizer.moment_dtype"),
    *("mesh.", "attention.", "remat.", "precision.", "checkpoint.", "eval.", "log.", "ledger."),
    "init_from",  # read once, before the first step
)


class Restored(NamedTuple):
    state: TrainState
    data_state: dict[str, Any]
    step: int


class Checkpointer:
    """Saves and restores the state of one run; every process of a job has one and makes the same calls.

    Args:
      workdir: directory of the run; created if missing.
      config: stored in every checkpoint, and compared with the stored one before resuming.
      say: prints a message about each checkpoint that is skipped.
      job: processes that share the workdir; a single process by default.
    """

    def __init__(self, workdir: pathlib.Path, config: Config, log: Callable[[str], None], job: Job | None = None):
        self._folder = (workdir / "checkpoints").absolute()  # Orbax requires absolute paths
        self._config = config
        self._log = log
        self._job = job or Job()
        self._orbax = arrays.checkpointer(self._job)
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        if self._job.is_leader:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(f"{_STAGING}*"):  # left by a killed run; never valid
                shutil.rmtree(leftover)

    @property
    def status(self) -> str:
        """Phrase for messages about the newest complete checkpoint."""
        newest = next(_complete_checkpoints(self._folder), None)
        return f"the last good checkpoint is {newest}" if newest else "no checkpoint has been saved yet"

    def save(self, step: int, state: TrainState, data_state: dict[str, Any], streams: Iterable[str] = ()) -> None:
        """Starts a save in the background; the state may be donated as soon as this returns.

        Args:
          step: batches trained on.
          state: the state after that step.
          data_state: {stream: position in it}.
          streams: the streams in `data_state` that this process writes; a single process writes all of them.
        Raises:
          UserError: the checkpoint does not fit on the disk, writing fails, or the previous save has failed.
        """
        self.wait()
        staging = self._folder / f"{_STAGING}{step}"
        try:
            if self._job.is_leader:
                self._check_space(step, state)
                (staging / "data").mkdir(parents=True)
                (staging / "config.json").write_text(json.dumps(overrides.to_dict(self._config), indent=1))
            self._job.barrier(f"save-{step}-begun")
            for stream in data_state if self._job.is_alone else streams:
                (staging / "data" / f"{stream}.json").write_text(json.dumps(data_state[stream]))
            arrays.save(self._orbax, staging / "state", state)
        except _STORAGE_ERRORS as error:
            if self._is_sync_error(error):
                raise
            raise self._save_error(step, staging, error) from error
        self._pending = self._executor.submit(self._finish, step, staging)

    def poll(self) -> None:
        """Raises the error of the pending save if it has already failed; never blocks."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Blocks until the pending save is on disk; raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, step: int, staging: pathlib.Path) -> None:
        job, final = self._job, self._folder / f"{step:08d}"
        try:
            self._orbax.wait_until_finished()
            job.barrier(f"save-{step}-written")
            files = job.gather(f"save-{step}-files", manifest.fingerprints(staging, job.index, job.count))
            if job.is_leader:
                manifest.write(staging, {name: file for part in files for name, file in part.items()})
                if final.exists():
                    manifest.set_aside(final)
                staging.rename(final)
                manifest.sync(self._folder)
            job.barrier(f"save-{step}-done")
        except _STORAGE_ERRORS as error:
            if self._is_sync_error(error):
                raise
            raise self._save_error(step, staging, error) from error
        if job.is_leader:
            for old in list(_complete_checkpoints(self._folder))[self._config.checkpoint.keep :]:
                shutil.rmtree(old)

    def _is_sync_error(self, error: BaseException) -> bool:
        """Returns True if an error comes from synchronizing with other processes rather than from the disk."""
        causes = (error, error.__cause__)
        return not self._job.is_alone and any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in causes)

    def _check_space(self, step: int, state: TrainState) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(dataclasses.replace(state, frozen=None)))
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise UserError(
                f"cannot save the checkpoint of step {step}: it needs {needed / 2**20:,.1f} MiB, but {self._folder} "
                f"has {free / 2**20:,.1f} MiB free; free some disk space and run the same command again; {self.status}"
            )

    def _save_error(self, step: int, staging: pathlib.Path, error: Exception) -> UserError:
        shutil.rmtree(staging, ignore_errors=True)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return UserError(
            f"cannot save the checkpoint of step {step} in {self._folder}: {reason}; "
            f"fix the cause and run the same command again; {self.status}"
        )

    def restore(self, abstract: TrainState) -> Restored | None:
        """Restores the newest intact checkpoint, the same one in every process; returns None if there is none.

        Damaged checkpoints are renamed, with a message; nothing is deleted.

        Args:
          abstract: shapes, dtypes and shardings to restore to; any mesh, ZeRO stage and precision.
        Raises:
          UserError: the run in this workdir has another configuration, every checkpoint is damaged, or this process
            does not see the checkpoint on its disk.
        """
        name = self._job.broadcast("restore", self._newest_intact)
        if name is None:
            return None
        path = self._folder / name
        if not path.is_dir():
            raise UserError(
                f"process {self._job.index} cannot find {path}, but process 0 can; put --workdir on a disk that all "
                "machines share"
            )
        state = arrays.restore(self._orbax, path / "state", abstract, self._config.precision.loss_scale)
        places = {file.stem: json.loads(file.read_text()) for file in (path / "data").glob("*.json")}
        return Restored(state, places, int(name))

    def _newest_intact(self) -> str | None:
        found = False
        for path in _complete_checkpoints(self._folder):
            found = True
            damage = manifest.find_damage(path)
            if damage:
                self._log(f"skipping checkpoint {path}: {damage}; renamed it to {manifest.set_aside(path).name}")
                continue
            check_same_run(json.loads((path / "config.json").read_text()), self._config, path)
            return path.name
        if found:
            raise UserError(
                f"every checkpoint in {self._folder} is damaged (renamed to *{manifest.DAMAGED}); restore a good copy, "
                "or run the same command again to start over"
            )
        return None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the checkpointer, except after an error in a multi-process job, where other processes may be gone."""
        if kind is None or self._job.is_alone:
            self.close()

    def close(self) -> None:
        """Waits for the pending save and releases the background threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._orbax.close()


def check_same_run(stored: dict[str, Any], config: Config, path: pathlib.Path) -> None:
    """Checks that `config` continues the run that stored `stored`, up to the fields in `_MAY_DIFFER`.

    Raises:
      UserError: other fields differ; names them.
    """
    old = overrides.field_paths(overrides.from_dict(stored))
    new = overrides.field_paths(config)
    changed = [key for key in new if old[key] != new[key] and not key.startswith(_MAY_DIFFER)]
    if changed:
        listed = ", ".join(f"config.{key} was {old[key]!r} and is now {new[key]!r}" for key in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"{path} was saved with another configuration: {listed}{more}; use another --workdir, or the old values"
        )


def newest(workdir: str | os.PathLike[str]) -> tuple[pathlib.Path, Config]:
    """Returns (folder, configuration) of the newest intact checkpoint of a training run.

    Raises:
      UserError: `workdir` is not a workdir, or has no intact checkpoint.
    """
    folder = pathlib.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{workdir} is not the workdir of a training run (it has no checkpoints/); check the path")
    reasons = []
    for path in _complete_checkpoints(folder):
        damage = manifest.find_damage(path)
        if not damage:
            return path, _read_config(path)
        reasons.append(f"{path.name}: {damage}")
    reason = "; ".join(reasons) or "none was completed"
    raise UserError(f"{workdir} has no usable checkpoint ({reason}); run its training command again to save one")


def stored_config(workdir: pathlib.Path) -> Config | None:
    """Returns the configuration in the newest checkpoint, verified or not; None if there is no readable one."""
    for path in _complete_checkpoints(workdir / "checkpoints"):
        try:
            return _read_config(path)
        except (OSError, ValueError):  # damaged; reported when it is restored
            continue
    return None


def _read_config(checkpoint: pathlib.Path) -> Config:
    return overrides.from_dict(json.loads((checkpoint / "config.json").read_text()))


def _complete_checkpoints(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the checkpoints that were renamed into place, newest first."""
    yield from sorted((p for p in folder.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name), reverse=True)
