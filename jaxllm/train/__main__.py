"""Trains a model: python -m jaxllm.train --config configs/quickstart.py [--workdir DIR] [--config.a.b=value …]

Prints the ledger before it starts, trains, and leaves checkpoints, metrics.jsonl and ledger.json in the
workdir. The same command in the same workdir goes on where the run stands.
"""

import pathlib

from absl import flags
from rich.console import Console

from jaxllm import commandline
from jaxllm.train.loop import Trainer

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; by default runs/<name of the config file>.")


def main() -> int:
    config = commandline.load_config()
    workdir = _WORKDIR.value or f"runs/{pathlib.Path(commandline.config_file()).stem}"
    return Trainer(config, pathlib.Path(workdir), Console(soft_wrap=False)).run()


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
