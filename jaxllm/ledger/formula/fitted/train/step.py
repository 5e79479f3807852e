"""Memory of a training step beside the state, by platform: one row per array and phase in which it is alive."""

from collections.abc import Iterator

from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.fitted.train import cpu, gpu, tpu
from jaxllm.ledger.rows import Row

_PLATFORMS = {"cpu": cpu, "gpu": gpu, "tpu": tpu}


def step_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields the rows of all training phases except the persistent one."""
    of = _PLATFORMS[run.platform]
    for phase in (of.forward_rows, of.boundary_rows, of.backward_rows, of.update_rows):
        yield from phase(run)
