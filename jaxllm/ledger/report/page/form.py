"""The form of the HTML page, and the bills for its values; runs in Python here and in the browser."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm import architectures
from jaxllm.config import CHOICES, overrides
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill, request
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.report import comparison, groups, sentences
from jaxllm.ledger.request import TASKS, BillRequest
from jaxllm.ledger.rows import KINDS, PHASES, Ledger, format_bytes

HERE = "this machine"


@dataclasses.dataclass(frozen=True)
class Field:
    """One control of the form.

    Attributes:
      name: `config.` and a field of the configuration, or a flag of the command.
      label: user-facing label.
      choices: allowed values; empty for a number.
      least: minimum of a number.
    """

    name: str
    label: str
    choices: tuple[str, ...] = ()
    least: int = 1


# Group -> controls.
FORM: dict[str, tuple[Field, ...]] = {
    "Model and device": (
        Field("config.model.name", "model", tuple(architectures.ARCHITECTURES)),
        Field("device", "device", tuple(detect.DEVICES)),
        Field("count", "devices"),
    ),
    "Mesh": (
        Field("config.mesh.data", "data"),
        Field("config.mesh.tensor", "tensor"),
        Field("config.mesh.replica", "replica"),
        Field("config.mesh.zero", "ZeRO stage", ("0", "1", "2", "3"), least=0),
    ),
    "Training": (
        Field("config.train.batch_size", "batch, sequences"),
        Field("config.data.sequence_length", "length, tokens", least=2),
        Field("config.optimizer.name", "optimizer", CHOICES["optimizer.name"]),
        Field("config.precision.policy", "precision", CHOICES["precision.policy"]),
        Field("config.attention.implementation", "attention", CHOICES["attention.implementation"]),
        Field("config.remat.policy", "remat", ("none", "full", "sqrt", "dots")),
        Field("config.train.accumulate", "micro-batches"),
        Field("config.train.loss_chunk", "loss chunk"),
        Field("config.train.attention_chunk", "attention chunk", least=0),
        Field("config.optimizer.moment_dtype", "moments", CHOICES["optimizer.moment_dtype"]),
        Field("config.optimizer.offload", "offload", CHOICES["optimizer.offload"]),
    ),
    "Inference": (
        Field("batch", "sequences"),
        Field("context", "context, tokens"),
        Field("infer.data", "mesh, data"),
        Field("infer.tensor", "mesh, tensor"),
        Field("weights", "weights", (bill.AUTO, *formats.FORMATS)),
        Field("cache", "KV cache", (bill.AUTO, *formats.CACHE_FORMATS)),
    ),
}


def initial_state(bill_request: BillRequest, device_name: str) -> dict[str, Any]:
    """Returns the initial state of the page as JSON: the configuration, the device if local, and the form's values.

    Args:
      bill_request: request that fills the form.
      device_name: value of `--device`. With `auto` the form shows `this machine`, and the page embeds its figures.
    """
    here = device_name not in detect.DEVICES
    flags = {
        "device": HERE if here else device_name,
        "count": request.count_of(bill_request),
        "batch": bill_request.batch,
        "context": request.context_of(bill_request),
        "infer.data": bill_request.mesh.data,
        "infer.tensor": bill_request.mesh.tensor,
        "weights": bill_request.weights,
        "cache": bill_request.cache,
    }
    values = overrides.field_paths(bill_request.config)
    names = [field.name for fields in FORM.values() for field in fields]
    return {
        "config": overrides.to_dict(bill_request.config),
        "machine": _machine_json(bill_request.device) if here else None,
        "chunk": bill_request.chunk,
        "texts": {name: str(flags[name] if name in flags else values[name.removeprefix("config.")]) for name in names},
    }


def _machine_json(device: Device) -> dict[str, Any]:
    figures = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return figures | {"compile_target": None, "peak_flops": dict(device.peak_flops)}


def to_request(initial: Mapping[str, Any], texts: Mapping[str, str]) -> BillRequest:
    """Returns the request for the form's values on top of the initial state.

    Overrides of model dimensions apply only to the model they were written for; selecting another model drops them.

    Args:
      initial: initial state, from `initial_state`.
      texts: control name -> text.
    Raises:
      UserError: a value is invalid for its field, or the device is unknown.
    """
    values = {field.name: _parsed(field, texts[field.name]) for fields in FORM.values() for field in fields}
    tree = {name: dict(node) if isinstance(node, dict) else node for name, node in initial["config"].items()}
    if values["config.model.name"] != tree["model"]["name"]:
        tree["model"] = {}
    for name, value in values.items():
        if name.startswith("config."):
            section, field = name.removeprefix("config.").split(".")
            tree[section][field] = value
    name = texts["device"]
    device = Device(**initial["machine"]) if name == HERE and initial["machine"] else detect.by_name(name)
    count, batch, context = (int(texts[flag]) for flag in ("count", "batch", "context"))
    dtypes = (texts["weights"], texts["cache"])
    sizes = InferenceMesh(int(texts["infer.data"]), int(texts["infer.tensor"]))
    return BillRequest(overrides.from_dict(tree), device, count, batch, context, initial["chunk"], *dtypes, sizes)


def _parsed(field: Field, text: str) -> int | str:
    if field.choices and not all(choice.isdigit() for choice in field.choices):
        return text
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"{_flag(field)} is {text!r}; it must be a whole number") from None
    if value < field.least:
        raise UserError(f"{_flag(field)} is {value}; it must be at least {field.least}")
    return value


def _flag(field: Field) -> str:
    """Returns the field's name as in messages of the command."""
    return field.name if field.name.startswith("config.") else f"--{field.name}"


def compute(initial: Mapping[str, Any], texts: Mapping[str, str], task: str = "both") -> dict[str, Any]:
    """Returns each requested task's bill as JSON, or {"error": one line}, and the comparison if both succeed.

    Args:
      initial: initial state, from `initial_state`.
      texts: control name -> text.
      task: train | infer | both.
    """
    tasks = TASKS if task == "both" else (task,)
    try:
        bill_request = to_request(initial, texts)
    except UserError as error:
        return {name: {"error": str(error)} for name in tasks} | {"comparison": []}
    makers = {"train": request.train, "infer": request.infer}
    bills = {name: _bill(makers[name], bill_request) for name in tasks}
    train, infer = bills.get("train"), bills.get("infer")
    compared = []
    if isinstance(train, Ledger) and isinstance(infer, Ledger):
        compared = [dataclasses.asdict(line) for line in comparison.lines(train, infer)]
    return {name: _to_json(ledger, bill_request) for name, ledger in bills.items()} | {"comparison": compared}


def _bill(make: Callable[[BillRequest], Ledger], bill_request: BillRequest) -> Ledger | str:
    """Returns the bill, or the error message if there is none."""
    try:
        return make(bill_request)
    except UserError as error:
        return str(error)


def _to_json(ledger: Ledger | str, bill_request: BillRequest) -> dict[str, Any]:
    """Returns the ledger as JSON, with the texts and sums that the page shows."""
    if isinstance(ledger, str):
        return {"error": ledger}
    shown = {
        "verdict": sentences.verdict(ledger, reserved_bytes=bill_request.device.reserved_bytes),
        "work": sentences.work(ledger),
        "largest": sentences.largest_first(ledger),
        "source": bill_request.device.source,
        "peak_phase": ledger.peak_phase,
        "phases": [{"name": p.name, "total": p.total, "groups": p.groups} for p in groups.phases(ledger)],
        "groups": [KINDS[row.kind] for row in ledger.rows],
        "texts": [format_bytes(row.bytes_per_device) for row in ledger.rows],
        "sums": {phase: format_bytes(ledger.phase_bytes(phase)) for phase in PHASES},
        "peak": format_bytes(ledger.peak_bytes),
        "capacity": format_bytes(ledger.capacity_bytes),
    }
    return ledger.to_json() | {"shown": shown}
