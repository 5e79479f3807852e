"""The bill: python -m jaxllm.ledger --config configs/quickstart.py [--task train|infer] [--config.a.b=value …]

Says, before anything runs, what memory and work a configuration needs on this machine and whether it fits.
"""

import dataclasses
import json

import jax
from absl import flags
from rich.console import Console

from jaxllm import architectures, commandline, hardware
from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError
from jaxllm.hardware import Device
from jaxllm.ledger import compute, inference, memory, report
from jaxllm.ledger.rows import Ledger, Unknown

_TASK = flags.DEFINE_enum("task", "train", ["train", "infer"], "What to bill.")
_BATCH = flags.DEFINE_integer("batch", 1, "infer: sequences at a time.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "infer: tokens of prompt and text; by default the model's context.", lower_bound=1
)
_JSON = flags.DEFINE_bool("json", False, "One JSON object on standard output, and nothing else.")

PREFILL_CHUNK = 256  # prompt tokens taken at a time


def bill(config: Config, model: Architecture, task: str, device: Device, batch: int, context: int) -> Ledger:
    """The ledger of a task on a device, with its capacity and the work of one step or one token."""
    platform = jax.default_backend()
    policy = config.precision.policy
    if policy == "auto":
        policy = "fp32" if platform == "cpu" else "bf16"
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[policy]
    if task == "train":
        made = memory.training(model, config, policy, platform)
        work = compute.train_step(model, config, policy)
    else:
        chunk = min(PREFILL_CHUNK, context)
        made = inference.inference(model, batch, context, chunk, policy, policy, config.model.name, platform)
        work = compute.decode_token(model, batch, context, policy, policy)
    capacity = device.memory_bytes
    return dataclasses.replace(
        made,
        device=device.name,
        capacity_bytes=Unknown(f"{device.name}: {device.source}") if capacity is None else capacity,
        compute=work.to_json(device, dtype),
    )


def main() -> int:
    config = commandline.load_config()
    model = architectures.resolve_config(config)
    context = _CONTEXT.value or model.context_length
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; ask for at most those"
        )
    device = hardware.this_machine()
    ledger = bill(config, model, _TASK.value, device, _BATCH.value, context)
    if _JSON.value:
        print(json.dumps(ledger.to_json(), indent=1))
    else:
        report.show_bill(ledger, device, Console())
    return 0


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
