"""One job of many processes: how they join, decide and wait for one another, all over the coordination service.

`jax.distributed` starts that service in process 0. It is a small store of keys with barriers, reached over the
network and never through the devices, so it can be used from any thread and while the devices are busy or stuck.
Who is alive is `jaxllm.job.watchdog`'s business, at which step all stop `jaxllm.job.stop_signals`'s.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxllm.errors import RunError, UserError

# A missing process ends the job long before (jaxllm.job.watchdog); a slow disk must not.
_PATIENCE_MS = 24 * 60 * 60 * 1000
_PREFIX = "jaxllm/"
# The service's own limit, after which it aborts what is left. It counts from a sign of life that may be half of it
# old, so that half must be later than the limits of jaxllm.job.watchdog, which tells more.
_HEARTBEAT_SECONDS = 56


class Job:
    """The processes of a run, seen from one of them; alone by default.

    Attributes:
      index: of this process; 0 leads: it alone prints and writes what there is one of.
      count: of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        self.index, self.count = index, count
        self._client = client

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def barrier(self, name: str) -> None:
        """Returns when every process has come to the barrier of this name, which is used once."""
        if not self.is_alone:
            self._client.wait_at_barrier(_PREFIX + name, _PATIENCE_MS)

    def decide(self, name: str, decision: Callable[[], Any]) -> Any:
        """What `decision` returns in process 0, in every process; as JSON can hold it.

        Where it raises, process 0 ends, and so do the others (`jaxllm.job.watchdog`).
        """
        if self.is_alone:
            return decision()
        if self.leads:
            self._client.key_value_set(_PREFIX + name, json.dumps(decision()))
        return json.loads(self._client.blocking_key_value_get(_PREFIX + name, _PATIENCE_MS))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every process's value, in their order, in process 0; the others get nothing. As JSON can hold it."""
        if self.is_alone:
            return [value]
        self.put(f"{name}/{self.index}", json.dumps(value))
        self.barrier(f"{name}-gathered")
        found = self.read(name) if self.leads else {}
        return [json.loads(found[key]) for key in sorted(found, key=int)]

    def put(self, key: str, value: str) -> None:
        """Sets a key for all to see, or replaces it."""
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def read(self, folder: str) -> dict[str, str]:
        """Keys below a folder -> their values; empty where there are none."""
        entries = self._client.key_value_dir_get(f"{_PREFIX}{folder}/")
        return {key.split(f"{_PREFIX}{folder}/", 1)[1]: value for key, value in entries}

    def orbax_options(self) -> ocp.options.MultiprocessingOptions:
        """With the processes named, Orbax waits through the service and not through the devices."""
        active = None if self.is_alone else set(range(self.count))
        return ocp.options.MultiprocessingOptions(active_processes=active)


def join(coordinator: str | None, processes: int | None, process: int | None, detect: bool) -> Job:
    """Joins the job that the arguments or the cluster describe. Nothing may have used a device before.

    Args:
      coordinator: host:port that process 0 listens on; with `processes` and `process`, or none of the three.
      processes: of the job.
      process: this one, from 0.
      detect: take what is not given from the cluster's environment, as JAX knows it (SLURM, Open MPI, Kubernetes
        JobSets, TPU pods).
    Raises:
      UserError: arguments that do not describe a job, or no cluster to detect.
      RunError: the others did not come.
    """
    given = (coordinator is not None) + (processes is not None) + (process is not None)
    if not given and not detect:
        return Job()
    _check(coordinator, processes, process, given, detect)
    # SIGTERM is ours: see jaxllm.job.stop_signals.
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
            f"--distributed found no cluster ({_first_line(error)}); start it under one, or give "
            "--coordinator HOST:PORT --processes N --process I"
        ) from error
    except RuntimeError as error:
        raise RunError(
            f"the processes of the job did not find each other in 5 minutes ({_first_line(error)}); check that all "
            "were started, and that they reach process 0's address"
        ) from error
    # JAX offers no public way to the service; Orbax takes the same.
    from jax._src import distributed

    found = distributed.global_state
    if found.process_id:  # C++ libraries greet on standard output, once a process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return Job(found.process_id, found.num_processes, found.client)


def leave(job: Job) -> None:
    """Leaves a job that has ended well: returns when every process has come here."""
    if not job.is_alone:
        jax.distributed.shutdown()


def _check(coordinator: str | None, processes: int | None, process: int | None, given: int, detect: bool) -> None:
    if given < 3 and not detect:
        missing = {"--coordinator": coordinator, "--processes": processes, "--process": process}
        names = ", ".join(name for name, value in missing.items() if value is None)
        raise UserError(f"{names} is missing; give --coordinator, --processes and --process together")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator is {coordinator!r}; it must be HOST:PORT, an address of process 0")
    if processes is not None and processes < 1:
        raise UserError(f"--processes is {processes}; it must be at least 1")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise UserError(f"--process is {process}; with --processes {processes} it lies between 0 and {processes - 1}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
