"""The bill: python -m jaxllm.ledger --config configs/quickstart.py [--task train|infer] [--config.a.b=value …]

Says, before anything runs, what memory and work a configuration needs on this machine and whether it fits.
"""

import json

from absl import flags
from rich.console import Console

from jaxllm import architectures, commandline, hardware
from jaxllm.decode import engine
from jaxllm.errors import UserError
from jaxllm.ledger import bill, report

_TASK = flags.DEFINE_enum("task", "train", ["train", "infer"], "What to bill.")
_BATCH = flags.DEFINE_integer("batch", 1, "infer: sequences at a time.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "infer: tokens of prompt and text; by default the model's context.", lower_bound=1
)
_JSON = flags.DEFINE_bool("json", False, "One JSON object on standard output, and nothing else.")


def main() -> int:
    config = commandline.load_config()
    model = architectures.resolve_config(config)
    context = _CONTEXT.value or model.context_length
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; ask for at most those"
        )
    device = hardware.this_machine()
    if _TASK.value == "train":
        ledger = bill.training(config, model, device)
    else:
        ledger = bill.sampling(bill.title(config), model, device, _BATCH.value, context, min(engine.CHUNK, context))
    if _JSON.value:
        print(json.dumps(ledger.to_json(), indent=1))
    else:
        report.show_bill(ledger, device, Console())
    return 0


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
