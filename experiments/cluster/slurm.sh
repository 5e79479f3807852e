#!/bin/bash
# A jaxllm training job under SLURM. Set what is below, then: sbatch slurm.sh
# The same command again goes on from the last checkpoint; so does SLURM itself, when a machine fails (--requeue).

# What to ask for: machines, and on each one process that has all of its GPUs.
#SBATCH --job-name=jaxllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM two minutes before the end of the time: the job saves and stops.
#SBATCH --signal=TERM@120

# What to train. Each can also be given in the environment: CONFIG=… sbatch slurm.sh
CONFIG=${CONFIG:-configs/quickstart.py}              # the run's file
WORKDIR=${WORKDIR:-runs/$(basename "$CONFIG" .py)}   # on a disk that all machines share
VENV=${VENV:-.venv}                                  # the environment that jaxllm is installed in, on every machine
OVERRIDES=${OVERRIDES:-}                             # for instance "--config.mesh.data=16 --config.mesh.zero=3"
# The product of config.mesh must be the devices of the job, and config.data.streams a multiple of its processes.

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# Under SLURM JAX takes one device a task, unless it is told; here a task has all those of its machine.
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-1} - 1)))
export JAX_LOCAL_DEVICE_IDS

# Where one process ends, those left end by themselves within a minute and say why.
srun --kill-on-bad-exit=0 \
    "$VENV/bin/python" -m jaxllm.train --distributed --config "$CONFIG" --workdir "$WORKDIR" $OVERRIDES
