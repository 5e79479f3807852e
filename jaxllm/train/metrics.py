"""Metrics log of a run: always `metrics.jsonl`, and TensorBoard event files if enabled.

Each line is one JSON object. Its "kind" is `step` (loss in nats per token, grad_norm, lr, tokens trained on, padding
tokens of the batch, seconds; with a loss scale also loss_scale, and skipped: 1 if gradients overflowed and no update
was made), `eval`, or `event` (start, resume, save, stop, not finite). A step is one batch trained on. In a job of many
processes, only process 0 writes.
"""

import json
import os
import pathlib
from types import TracebackType
from typing import Any, TextIO

from jaxllm.errors import UserError


class MetricsWriter:
    """Writer that appends to a run's `metrics.jsonl`; flushes each line, so that a killed run loses none.

    Args:
      workdir: directory of the run; None disables the writer (all processes but process 0).
      first_step: steps already done; records of later steps, from a killed run, are removed because they run again.
      tensorboard: also write event files to `workdir/tensorboard`.
    Raises:
      UserError: `tensorboard` is set and tensorboardX is not installed.
    """

    def __init__(self, workdir: pathlib.Path | None, first_step: int, tensorboard: bool):
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        if workdir is None:
            return
        path = workdir / "metrics.jsonl"
        _drop_records_after(path, first_step)
        self._file = path.open("a")
        if tensorboard:
            try:
                import tensorboardX
            except ImportError as error:
                raise UserError(
                    "config.log.tensorboard needs tensorboardX, which is not installed; pip install "
                    "'jaxllm[tensorboard]'"
                ) from error
            self._tensorboard = tensorboardX.SummaryWriter(
                str(workdir / "tensorboard"), purge_step=first_step + 1 if first_step else None
            )

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Appends one record of `values`, taken after `step` steps."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._tensorboard is not None and kind != "event":
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a `metrics.jsonl`; skips incomplete lines, as a killed run may leave."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _drop_records_after(path: pathlib.Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(temporary, path)
