"""Runs a command by its short name: `jaxllm train …` is `python -m jaxllm.train …`.

    jaxllm train     train or fine-tune a model            jaxllm models    list the published models by name
    jaxllm sample    continue prompts, or chat             jaxllm devices   list the devices that --device accepts
    jaxllm ledger    memory, compute and time of a run
    jaxllm plan      search for the run that fits and is fastest
    jaxllm convert   write a model as safetensors, GGUF or a PEFT adapter

`jaxllm <command> --help` lists the flags of a command.
"""

import runpy
import sys

from rich.console import Console
from rich.table import Table

from jaxllm.errors import nearest

_COMMANDS = ("train", "sample", "ledger", "plan", "convert")
_GIB, _GB, _TERA = 2**30, 1e9, 1e12


def models() -> Table:
    """Table of the models that `config.model.name` and `plan --model` accept."""
    from jaxllm.architectures import ARCHITECTURES
    from jaxllm.model import specs  # imports JAX, which the other commands of this file do without

    table = Table("model", box=None)
    for heading in ("parameters", "layers", "width", "context"):
        table.add_column(heading, justify="right")
    for name, model in ARCHITECTURES.items():
        count = f"{specs.parameter_count(model) / 1e9:,.2f} B"
        table.add_row(name, count, *(f"{size:,}" for size in (model.layers, model.width, model.context_length)))
    return table


def devices() -> Table:
    """Table of the devices that `--device` accepts, with their usable memory, bandwidth and dense bfloat16 peak."""
    from jaxllm.hardware.gpus import GPUS
    from jaxllm.hardware.tpus import TPUS

    table = Table("device", "name", box=None)
    for heading in ("GiB", "GB/s", "TFLOP/s (bf16)"):
        table.add_column(heading, justify="right")
    for key, (_, device) in {**GPUS, **TPUS}.items():
        figures = (
            (device.memory_bytes, _GIB, "{:.1f}"),
            (device.bandwidth, _GB, "{:,.0f}"),
            (device.peak_flops.get("bfloat16"), _TERA, "{:,.0f}"),
        )
        table.add_row(key, device.name, *(form.format(x / unit) if x else "–" for x, unit, form in figures))
    return table


def main() -> None:
    """Entry point of the console script `jaxllm`; exits with the command's status, or 2 for an unknown command."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
    elif name in ("models", "devices") and not arguments:
        Console(highlight=False).print(models() if name == "models" else devices())
    elif name in _COMMANDS:
        sys.argv[1:] = arguments
        runpy.run_module(f"jaxllm.{name}", run_name="__main__", alter_sys=True)
    else:
        known = (*_COMMANDS, "models", "devices")
        problem = f"jaxllm {name} takes no arguments"
        if name not in known:
            problem = f"unknown command {name!r}; did you mean {nearest(name, known)}?"
        print(f"error: {problem} (jaxllm --help lists the commands)", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
