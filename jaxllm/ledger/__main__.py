"""The bill: python -m jaxllm.ledger --config configs/quickstart.py [--task train|infer] [--config.a.b=value …]
[--device h100 --count 8] [--compile] [--json]

Says, before anything runs, what memory and work a configuration needs on this machine, or on another that need not
be there, and whether it fits. With --compile, XLA's own figures stand beside: the program is compiled and not run.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from absl import flags
from rich.console import Console

from jaxllm import architectures, commandline, hardware, mesh
from jaxllm.config import Architecture, Config
from jaxllm.decode import engine
from jaxllm.errors import UserError
from jaxllm.hardware import Device
from jaxllm.ledger import absent, bill, compiled, report
from jaxllm.ledger.compiled import Inspection
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.rows import Ledger, Unknown, figure_to_json
from jaxllm.ledger.tasks import Sampling, programs_of

_TASK = flags.DEFINE_enum("task", "train", ["train", "infer"], "What to bill.")
_DEVICE = flags.DEFINE_string(
    "device", "auto", f"The device: auto is this machine's; or {', '.join(hardware.DEVICES)}."
)
_COUNT = flags.DEFINE_integer("count", None, "Devices; by default as many as config.mesh takes.", lower_bound=1)
_COMPILE = flags.DEFINE_bool("compile", False, "Compile the programs too, and tell XLA's figures.")
_BATCH = flags.DEFINE_integer("batch", 1, "infer: sequences at a time.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "infer: tokens of prompt and text; by default the model's context.", lower_bound=1
)
_JSON = flags.DEFINE_bool("json", False, "One JSON object on standard output, and nothing else.")


def main() -> int:
    config = commandline.load_config()
    model = architectures.resolve_config(config)
    sampling = _sampling(model) if _TASK.value == "infer" else None
    if sampling is None:
        absent.require_count(config, _COUNT.value or math.prod(mesh.sizes(config.mesh).values()))
    elif (_COUNT.value or 1) != 1:
        raise UserError(f"--task infer is billed on one device, and --count is {_COUNT.value}")
    device = hardware.named(_DEVICE.value)
    if sampling is None:
        ledger = bill.training(config, model, device)
    else:
        ledger = bill.sampling(bill.title(config), model, device, sampling.batch, sampling.context, sampling.chunk)
    inspections = _inspect(config, model, device, ledger.count, sampling) if _COMPILE.value else {}
    if _JSON.value:
        print(json.dumps(_to_json(ledger, inspections), indent=1))
    else:
        report.show_bill(ledger, device, Console())
        for name, inspection in inspections.items():
            report.show_inspection(name, inspection, ledger, Console())
    return 0


def _sampling(model: Architecture) -> Sampling:
    context = _CONTEXT.value or model.context_length
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; ask for at most those"
        )
    return Sampling(_BATCH.value, context, min(engine.CHUNK, context), engine.STEPS)


def _inspect(
    config: Config, model: Architecture, device: Device, count: int, sampling: Sampling | None
) -> dict[str, Inspection]:
    if _DEVICE.value != "auto":
        return absent.inspect(config, _DEVICE.value, count, sampling)
    over = absent.abstract_mesh(config) if sampling else mesh.make_mesh(config.mesh)
    made = programs_of(config, model, device.platform, over, sampling)
    return {name: compiled.inspect(program.compile) for name, program in made.items()}


def _to_json(ledger: Ledger, inspections: Mapping[str, Inspection]) -> dict[str, Any]:
    """The ledger JSON. The compiled column is of the program that needs most; `programs` has them all."""
    if not inspections:
        return ledger.to_json()
    known = [found.figures for found in inspections.values() if not isinstance(found.figures["peak"], Unknown)]
    figures = max(known, key=lambda found: found["peak"], default=next(iter(inspections.values())).figures)
    told = reconcile(ledger, figures).to_json()
    told["columns"]["compiled"] |= {name: figure_to_json(value) for name, value in figures.items()}
    return told | {"programs": {name: found.to_json() for name, found in inspections.items()}}


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
