"""The memory of a training run in closed form, without a trace; that of inference is `ledger.inference`.

Exact: every row of the persistent phase and of the host's memory (`ledger.states`), the batch, the copies that
compute, the gradients and their accumulator, and what waits for the backward pass (`ledger.activations`). Approximate:
the workspaces, which are the compiler's choice (`ledger.xla`). The tests hold the peak that they make against
XLA's.

Only the configuration, the specs and the mesh's rules are read, never the model's code, so that agreement is evidence.
"""

import jax

from jaxllm.config import Architecture, Config
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.state import state_rows
from jaxllm.ledger.formula.fitted.train.step import step_rows
from jaxllm.ledger.rows import HOST, Ledger, Row
from jaxllm.model.specs import ParamSpec, is_spec


def leaves(specs: object) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


def training(model: Architecture, config: Config, policy_name: str, platform: str = "cpu") -> Ledger:
    """The bill of a training run, in bytes on each of its devices: as many as the mesh's axes make together.

    Args:
      policy_name: of precision: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu. XLA's CPU backend multiplies no bfloat16 numbers and no ragged groups: it makes
        both from plain float32 products.
    Raises:
      UserError: an array cannot be split as the mesh wants it, or attention not be computed as the configuration says.
    """
    run = run_lib.make(model, config, policy_name, platform)
    made = (*state_rows(run), *step_rows(run))
    parameters = sum(parameter.spec.size for parameter in run.parameters)
    trained = sum(parameter.spec.size for parameter in run.trained)
    return Ledger(
        "train",
        config.model.name,
        parameters,
        "",
        run.devices,
        tuple(_device_then_host(made)),
        trained=trained,
        attention=run.attention.line,
    )


def _device_then_host(made: tuple[Row, ...]) -> list[Row]:
    return [row for row in made if row.phase != HOST] + [row for row in made if row.phase == HOST]
