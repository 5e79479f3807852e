"""Trains a model: python -m jaxllm.train --config configs/quickstart.py [--workdir DIR] [--config.a.b=value …]

Prints the ledger before it starts, then trains, and writes checkpoints, metrics.jsonl and ledger.json to the
workdir. The same command with the same workdir resumes the run.

On several machines, run the command once per machine (or once per device), with the workdir on a shared disk: under
SLURM, Kubernetes or a TPU pod with --distributed, elsewhere with --coordinator HOST:PORT --processes N --process I.
See experiments/cluster/.
"""

import io
import os
import pathlib
import sys
import traceback

from absl import flags
from rich.console import Console

from jaxllm import commandline
from jaxllm.errors import RunError, UserError
from jaxllm.job import distributed
from jaxllm.job.distributed import Job
from jaxllm.job.watchdog import Watchdog
from jaxllm.train.trainer import Trainer

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run (default: runs/<name of the config file>).")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the job described by the cluster's environment.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for a job without a cluster.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes in the job.")
_PROCESS = flags.DEFINE_integer("process", None, "Index of this process, from 0.")


def main() -> int:
    config = commandline.load_config()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{pathlib.Path(commandline.config_file()).stem}")
    job = distributed.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, _DISTRIBUTED.value)
    # Only process 0 prints; the other processes print errors alone.
    console = Console(soft_wrap=False) if job.is_leader else Console(file=io.StringIO(), width=100)
    watchdog = Watchdog(job)
    try:
        status = Trainer(config, workdir, console, job, watchdog).run()
    except BaseException as error:
        if job.is_alone:
            raise
        _exit_process(job, watchdog, error)
    watchdog.close()
    distributed.leave(job)
    return status


def _exit_process(job: Job, watchdog: Watchdog, error: BaseException) -> None:
    """Reports an error, then ends this process and the job.

    Uses os._exit, because Python's shutdown may wait for threads that wait for dead processes.
    """
    is_expected = isinstance(error, (UserError, RunError))
    line = " ".join(str(error).split())[:500] or type(error).__name__
    watchdog.report_failure(error, line if is_expected else f"{type(error).__name__}: {line}")
    if is_expected:
        commandline.log(f"error: {error}")
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
