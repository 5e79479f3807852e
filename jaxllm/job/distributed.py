"""Start-up and coordination of the processes of a job, through JAX's coordination service.

`jax.distributed` starts the service in process 0. It is a small key-value store with barriers, reached over the
network and never through the devices, so it works from any thread and while the devices are busy or stuck.
`jaxllm.job.watchdog` monitors liveness; `jaxllm.job.stop_signals` agrees on the step after which all stop.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxllm.errors import RunError, UserError

# The watchdog ends the job much earlier if a process is missing; this limit only has to tolerate slow disks.
_TIMEOUT_MS = 24 * 60 * 60 * 1000
_PREFIX = "jaxllm/"
# Heartbeat timeout of the service, after which it aborts the remaining processes. The last heartbeat may already be
# half the timeout old, so half of it must exceed the limits of jaxllm.job.watchdog, whose message says more.
_HEARTBEAT_SECONDS = 56


class Job:
    """The processes of a run, as seen from one of them; a single process by default.

    Attributes:
      index: index of this process. Process 0 leads: it alone prints and writes shared files.
      count: number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        self.index, self.count = index, count
        self._client = client

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def barrier(self, name: str) -> None:
        """Blocks until every process has reached the barrier `name`; each name can be used once."""
        if not self.is_alone:
            self._client.wait_at_barrier(_PREFIX + name, _TIMEOUT_MS)

    def broadcast(self, name: str, compute: Callable[[], Any]) -> Any:
        """Calls `compute` in process 0 and returns its result, which must be JSON-serializable, in every process.

        If it raises, process 0 ends, and the watchdog ends the others.
        """
        if self.is_alone:
            return compute()
        if self.is_leader:
            self._client.key_value_set(_PREFIX + name, json.dumps(compute()))
        return json.loads(self._client.blocking_key_value_get(_PREFIX + name, _TIMEOUT_MS))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns the JSON-serializable values of all processes, in order, in process 0; [] in the others."""
        if self.is_alone:
            return [value]
        self.put(f"{name}/{self.index}", json.dumps(value))
        self.barrier(f"{name}-gathered")
        found = self.read(name) if self.is_leader else {}
        return [json.loads(found[key]) for key in sorted(found, key=int)]

    def put(self, key: str, value: str) -> None:
        """Sets or replaces a key in the service, visible to all processes."""
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def read(self, folder: str) -> dict[str, str]:
        """Returns {key relative to `folder`: value} for all keys below `folder`."""
        entries = self._client.key_value_dir_get(f"{_PREFIX}{folder}/")
        return {key.split(f"{_PREFIX}{folder}/", 1)[1]: value for key, value in entries}

    def orbax_options(self) -> ocp.options.MultiprocessingOptions:
        """Returns Orbax options that list the processes, so that Orbax synchronizes through the service."""
        active = None if self.is_alone else set(range(self.count))
        return ocp.options.MultiprocessingOptions(active_processes=active)


def join(coordinator: str | None, processes: int | None, process: int | None, detect: bool) -> Job:
    """Joins the job described by the arguments or by the cluster; call it before JAX uses any device.

    Args:
      coordinator: HOST:PORT on which process 0 listens. Without `detect`, give all of `coordinator`, `processes` and
        `process`, or none for a single-process job.
      processes: number of processes in the job.
      process: index of this process, from 0.
      detect: take missing arguments from the cluster environment, as detected by JAX (SLURM, Open MPI, Kubernetes
        JobSets, TPU pods).
    Raises:
      UserError: the arguments do not describe a job, or no cluster is detected.
      RunError: the other processes did not connect within 5 minutes.
    """
    given = (coordinator is not None) + (processes is not None) + (process is not None)
    if not given and not detect:
        return Job()
    _check(coordinator, processes, process, given, detect)
    # jaxllm.job.stop_signals handles SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method="deactivate" if given == 3 else None,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )
    except ValueError as error:
        raise UserError(
            f"--distributed found no cluster ({_first_line(error)}); start the command in a cluster job, or give "
            "--coordinator HOST:PORT --processes N --process I"
        ) from error
    except RuntimeError as error:
        raise RunError(
            f"the processes of the job did not connect within 5 minutes ({_first_line(error)}); check that all were "
            "started and can reach the address of process 0"
        ) from error
    # JAX has no public API for the service; Orbax uses this private one too.
    from jax._src import distributed

    state = distributed.global_state
    if state.process_id:  # C++ libraries print to standard output, once per process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return Job(state.process_id, state.num_processes, state.client)


def leave(job: Job) -> None:
    """Leaves a job that has ended without error; blocks until every process has called it."""
    if not job.is_alone:
        jax.distributed.shutdown()


def _check(coordinator: str | None, processes: int | None, process: int | None, given: int, detect: bool) -> None:
    if given < 3 and not detect:
        missing = {"--coordinator": coordinator, "--processes": processes, "--process": process}
        names = ", ".join(name for name, value in missing.items() if value is None)
        raise UserError(f"missing {names}; give --coordinator, --processes and --process together")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator is {coordinator!r}; it must be HOST:PORT, the address of process 0")
    if processes is not None and processes < 1:
        raise UserError(f"--processes is {processes}; it must be at least 1")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise UserError(
            f"--process is {process}; with --processes {processes} it must be between 0 and {processes - 1}"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
