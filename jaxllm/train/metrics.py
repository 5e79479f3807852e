"""The record of a run: `metrics.jsonl` always, TensorBoard where it is asked for.

One JSON object a line, told apart by "kind": `step` (loss in nats a token, grad_norm, lr, tokens trained on,
padding tokens of the batch, seconds; with a loss scale also loss_scale, and skipped: 1 where gradients overflowed and
no update was made), `eval`, and `event` (start, resume, save, stop, not finite). A step is a batch trained on; of a
job of many processes, process 0 keeps the one record.
"""

import json
import os
import pathlib
from types import TracebackType
from typing import Any, TextIO

from jaxllm.errors import UserError


class MetricsWriter:
    """Appends to a workdir's record; each line is flushed, so a killed run loses none that it wrote.

    Args:
      workdir: of the run; None records nothing, as in the processes beside the first.
      first_step: steps already done; what a killed run recorded after them is removed, as it will be done again.
      tensorboard: also write event files to `workdir/tensorboard`.
    Raises:
      UserError: tensorboard without its extra.
    """

    def __init__(self, workdir: pathlib.Path | None, first_step: int, tensorboard: bool):
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        if workdir is None:
            return
        path = workdir / "metrics.jsonl"
        _forget_after(path, first_step)
        self._file = path.open("a")
        if tensorboard:
            try:
                import tensorboardX
            except ImportError as error:
                raise UserError(
                    "config.log.tensorboard is set and tensorboardX is not installed; pip install 'jaxllm[tensorboard]'"
                ) from error
            self._tensorboard = tensorboardX.SummaryWriter(
                str(workdir / "tensorboard"), purge_step=first_step + 1 if first_step else None
            )

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records `values` after `step` steps."""
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
    """The records of a `metrics.jsonl`; a line that a killed run left half-written is passed over."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _forget_after(path: pathlib.Path, step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(temporary, path)
