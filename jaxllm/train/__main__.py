"""Trains a model: python -m jaxllm.train --config configs/quickstart.py [--workdir DIR] [--config.a.b=value …]

Prints the ledger before it starts, trains, and leaves checkpoints, metrics.jsonl and ledger.json in the
workdir. The same command in the same workdir goes on where the run stands.

On several machines, one such command runs on each (or one for each of their devices), with the workdir on a disk
that all share: under SLURM, Kubernetes or a TPU pod with --distributed, elsewhere with --coordinator HOST:PORT
--processes N --process I. See experiments/cluster/.
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
    # One process speaks; of the others, errors alone are heard.
    console = Console(soft_wrap=False) if job.leads else Console(file=io.StringIO(), width=100)
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
    """Ends this process and the job. At once, past Python's own end: threads may wait for those who are gone."""
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
