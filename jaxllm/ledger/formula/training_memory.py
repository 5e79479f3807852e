"""Memory of a training run in closed form, without a trace; `inference_memory` is its counterpart for inference.

Exact: every row of the persistent phase and of host memory (`exact.state`), the batch, the compute copies of weights,
the gradients and their accumulator, and the saved activations (`exact.activations`). Approximate: the workspaces,
which depend on the compiler (`fitted.train`). The tests compare the resulting peak with XLA's.

Only the configuration, the parameter specs and the mesh rules are read, never the model's code, so agreement with the
compiled program is evidence.
"""

from collections.abc import Iterator

from jaxllm.config import Architecture, Config
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.exact.state import state_rows
from jaxllm.ledger.formula.fitted.train import cpu, gpu, tpu
from jaxllm.ledger.rows import HOST, Ledger, Row

# Rules for the memory of a step beside the state: one row per array and phase in which it is alive.
_PLATFORMS = {"cpu": cpu, "gpu": gpu, "tpu": tpu}


def training(model: Architecture, config: Config, policy_name: str, platform: str = "cpu") -> Ledger:
    """Returns the memory bill of a training run, in bytes per device; the devices are all those of the mesh.

    Args:
      policy_name: Precision policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu. XLA's CPU backend has no bfloat16 matmuls and no ragged (grouped) matmuls: it builds
        both from plain float32 matmuls.

    Raises:
      UserError: An array cannot be sharded as the mesh requires, or attention cannot be computed as configured.
    """
    return bill(run_lib.make(model, config, policy_name, platform))


def bill(run: TrainingRun) -> Ledger:
    """Returns the memory bill of a training run; see `training`."""
    made = (*state_rows(run), *step_rows(run))
    parameters = sum(parameter.spec.size for parameter in run.parameters)
    trained = sum(parameter.spec.size for parameter in run.trained)
    return Ledger(
        "train",
        run.config.model.name,
        parameters,
        "",
        run.devices,
        tuple(_device_then_host(made)),
        trained=trained,
        attention=run.attention.line,
    )


def step_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields the rows of all training phases except the persistent one."""
    rules = _PLATFORMS[run.platform]
    for phase in (rules.forward_rows, rules.boundary_rows, rules.backward_rows, rules.update_rows):
        yield from phase(run)


def _device_then_host(made: tuple[Row, ...]) -> list[Row]:
    return [row for row in made if row.phase != HOST] + [row for row in made if row.phase == HOST]
