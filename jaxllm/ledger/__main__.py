"""Command that predicts the memory and compute of a configuration and reports whether it fits a device.

    python -m jaxllm.ledger --config configs/quickstart.py [--task train|infer|both] [--config.a.b=value …]
        [--device h100 --count 8] [--weights int4 --cache int8] [--compile] [--json] [--html bill.html] [--png bill.png]

The device is this machine's or any supported one, attached or absent. Nothing runs. --compile also compiles the
programs, without running them, and reports XLA's figures beside the predicted ones. --html writes the bill as a page
with a what-if form that recomputes it; --png writes it as a picture.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags
from rich.console import Console

from jaxllm import commandline
from jaxllm.checkpoints import open_any
from jaxllm.config import inference_mesh
from jaxllm.decode.generate import DECODE_STEPS, PREFILL_CHUNK
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.ledger import request
from jaxllm.ledger.bill import AUTO
from jaxllm.ledger.compiled import absent, inspection
from jaxllm.ledger.compiled.inspection import Inspection, SamplingSpec, task_programs
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.report import page, picture, terminal
from jaxllm.ledger.request import TASKS, BillRequest
from jaxllm.ledger.rows import Ledger, Unknown, figure_to_json
from jaxllm.parallel import mesh

_TASK = flags.DEFINE_enum("task", "train", [*TASKS, "both"], "Task to bill; both shows them side by side.")
_DEVICE = flags.DEFINE_string("device", "auto", f"Device: auto (this machine's) | {' | '.join(detect.DEVICES)}.")
_COUNT = flags.DEFINE_integer("count", None, "Number of devices (default: that of config.mesh).", lower_bound=1)
_COMPILE = flags.DEFINE_bool("compile", False, "Also compile the programs and show XLA's figures.")
_BATCH = flags.DEFINE_integer("batch", 1, "infer: number of concurrent sequences.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "infer: tokens per sequence, prompt included (default: the model's context).", lower_bound=1
)
_WEIGHTS = flags.DEFINE_enum(
    "weights", AUTO, [AUTO, *formats.FORMATS], "infer: weight format; auto is the compute dtype."
)
_CACHE = flags.DEFINE_enum(
    "cache", AUTO, [AUTO, *formats.CACHE_FORMATS], "infer: KV cache format; auto is the compute dtype."
)
_MESH = flags.DEFINE_string("mesh", "tensor=1", "infer: devices, as tensor=N or data=M,tensor=N.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object to standard output, and nothing else.")
_HTML = flags.DEFINE_string("html", None, "Write the bill to an HTML file with a what-if form.")
_PNG = flags.DEFINE_string("png", None, "Write the bill to a PNG file.")


def main() -> int:
    config = open_any.resolved(commandline.load_config())
    _check_outputs()
    asked = BillRequest(
        config=config,
        device=detect.by_name(_DEVICE.value),
        count=_COUNT.value,
        batch=_BATCH.value,
        context=_CONTEXT.value,
        chunk=PREFILL_CHUNK,
        weights=_WEIGHTS.value,
        cache=_CACHE.value,
        mesh=inference_mesh.parse(_MESH.value),
    )
    if _TASK.value == "infer" and (_COUNT.value or asked.mesh.count) != asked.mesh.count:
        raise UserError(
            f"--count is {_COUNT.value}, but --mesh {asked.mesh} has {asked.mesh.count} device(s); "
            f"give --mesh=tensor={_COUNT.value}"
        )
    makers = {"train": request.train, "infer": request.infer}
    tasks = TASKS if _TASK.value == "both" else (_TASK.value,)
    if _COMPILE.value and "infer" in tasks:
        request.require_programs(asked)
    bills = {task: makers[task](asked) for task in tasks}
    inspections = {task: _inspect(asked, task) if _COMPILE.value else {} for task in tasks}
    if _JSON.value:
        as_json = {task: _to_json(bills[task], inspections[task]) for task in tasks}
        print(json.dumps(as_json if len(tasks) > 1 else as_json[tasks[0]], indent=1))
    else:
        _show(bills, inspections, asked)
    if _PNG.value:
        picture.write(list(bills.values()), _PNG.value)
    if _HTML.value:
        pathlib.Path(_HTML.value).write_text(page.render(asked, _DEVICE.value, _TASK.value))
    return 0


def _check_outputs() -> None:
    """Checks, before any work is done, that the --html and --png files can be written.

    Raises:
      UserError: A path is not a writable file, or a package that writes the file is not installed.
    """
    for flag, value, require in (("--html", _HTML.value, page.require), ("--png", _PNG.value, picture.require)):
        if value is None:
            continue
        path = pathlib.Path(value)
        if path.is_dir() or not path.parent.is_dir():
            missing = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UserError(f"{flag} {value}: {missing}; name a file in a folder that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"{flag} {value}: not writable; give a file in a folder that you can write to")
        require()


def _show(bills: Mapping[str, Ledger], inspections: Mapping[str, Mapping[str, Inspection]], asked: BillRequest) -> None:
    console = Console()
    for task, ledger in bills.items():
        terminal.show_bill(ledger, asked.device, console)
        for name, found in inspections[task].items():
            terminal.show_inspection(name, found, ledger, console)
    if len(bills) > 1:
        terminal.show_comparison(bills["train"], bills["infer"], console)


def _sampling(asked: BillRequest) -> SamplingSpec:
    context = request.context_of(asked)
    batch = asked.mesh.rows(asked.batch) * asked.mesh.data
    return SamplingSpec(batch, context, min(asked.chunk, context), DECODE_STEPS, asked.cache, asked.mesh, asked.weights)


def _inspect(asked: BillRequest, task: str) -> dict[str, Inspection]:
    sampling = _sampling(asked) if task == "infer" else None
    if _DEVICE.value != "auto":
        count = asked.mesh.count if sampling else request.count_of(asked)
        return absent.inspect(asked.config, _DEVICE.value, count, sampling)
    over = mesh.make_mesh(asked.mesh.config if sampling else asked.config.mesh)
    made = task_programs(asked.config, asked.model, asked.device.platform, over, sampling)
    return {name: inspection.inspect(program.compile) for name, program in made.items()}


def _to_json(ledger: Ledger, inspections: Mapping[str, Inspection]) -> dict[str, Any]:
    """Returns the ledger JSON; its compiled column is the program with the highest peak, `programs` lists them all."""
    if not inspections:
        return ledger.to_json()
    known = [found.figures for found in inspections.values() if not isinstance(found.figures["peak"], Unknown)]
    figures = max(known, key=lambda found: found["peak"], default=next(iter(inspections.values())).figures)
    as_json = reconcile(ledger, figures).to_json()
    as_json["columns"]["compiled"] |= {name: figure_to_json(value) for name, value in figures.items()}
    return as_json | {"programs": {name: found.to_json() for name, found in inspections.items()}}


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
