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

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; by default runs/<name of the config file>.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One process of a job that the cluster's environment describes.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT on the machine of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Processes of the job.")
_PROCESS = flags.DEFINE_integer("process", None, "This process, from 0.")


def main() -> int:
    config = commandline.load_config()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{pathlib.Path(commandline.config_file()).stem}")
    job = distributed.join(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, _DISTRIBUTED.value)
    # Only process 0 prints; the other processes print errors alone.
    console = Console(soft_wrap=False) if job.is_leader else Console(file=io.StringIO(), width=100)
    watch = Watchdog(job)
    try:
        status = Trainer(config, workdir, console, job, watch).run()
    except BaseException as error:
        if job.is_alone:
            raise
        _end(job, watch, error)
    watch.close()
    distributed.leave(job)
    return status


def _end(job: Job, watch: Watchdog, error: BaseException) -> None:
    """Reports an error, then ends this process and the job.

    Uses os._exit, because Python's shutdown may wait for threads that wait for dead processes.
    """
    line = " ".join(str(error).split())[:500] or type(error).__name__
    watch.failed(error, line if isinstance(error, (UserError, RunError)) else f"{type(error).__name__}: {line}")
    if isinstance(error, (UserError, RunError)):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
