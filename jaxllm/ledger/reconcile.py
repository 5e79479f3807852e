"""Compares the formula column of a ledger with the trace, compiled and device columns."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.ledger import device as device_lib
from jaxllm.ledger.rows import BOUNDARY, HOST, PERSISTENT, Figure, Ledger, Unknown, figure_to_json

COLUMNS = ("formula", "trace", "compiled", "device")
# State, and activations in the trace column, must match to the byte; only the peak is an estimate.
EXACT = ("weights", "optimizer", "persistent")
FIGURES = (*EXACT, "activations", "peak")


@dataclasses.dataclass(frozen=True)
class ReconciledFigure:
    """One figure in every column, in bytes on one device.

    Attributes:
      name: One of FIGURES. State in host memory is included.
      columns: Value in each of COLUMNS.
    """

    name: str
    columns: Mapping[str, Figure]

    def gap(self, column: str) -> float | Unknown:
        """Returns (formula − column) / column: positive if the formula is higher."""
        formula, other = self.columns["formula"], self.columns[column]
        if isinstance(formula, Unknown):
            return formula
        if isinstance(other, Unknown):
            return other
        if not other:
            return 0.0 if not formula else Unknown(f"the {column} column is 0 B and the formula is {formula:,} B")
        return (formula - other) / other


@dataclasses.dataclass(frozen=True)
class Reconciliation:
    """A ledger with its measured columns. `to_json` returns the ledger JSON with all columns."""

    ledger: Ledger
    figures: tuple[ReconciledFigure, ...]

    def ok(self, tolerance: float) -> bool:
        """Returns True if measured state and activations match to the byte and known peaks are within `tolerance`."""
        return not self.faults(tolerance)

    def faults(self, tolerance: float) -> list[str]:
        """Returns one message per known figure that differs from the formula by more than is allowed.

        Args:
          tolerance: Allowed relative gap of peaks; all other figures must match exactly.
        """
        messages = []
        for figure in self.figures:
            for column in COLUMNS[1:]:
                formula, other = figure.columns["formula"], figure.columns[column]
                if isinstance(formula, Unknown) or isinstance(other, Unknown):
                    continue
                gap = figure.gap(column)
                allowed = tolerance if figure.name == "peak" else 0.0
                if isinstance(gap, Unknown) or abs(gap) > allowed:
                    reason = gap.why if isinstance(gap, Unknown) else f"{gap:+.2%}"
                    messages.append(f"{figure.name}: formula {formula:,} B, {column} {other:,} B ({reason})")
        return messages

    def to_json(self) -> dict[str, Any]:
        columns = {
            column: {figure.name: figure_to_json(figure.columns[column]) for figure in self.figures}
            for column in COLUMNS
        }
        gaps = {
            figure.name: {column: figure_to_json(figure.gap(column)) for column in COLUMNS[1:]}
            for figure in self.figures
        }
        return self.ledger.to_json() | {"columns": columns, "gaps": gaps}


def reconcile(
    ledger: Ledger,
    compiled_figures: Mapping[str, Any] | None = None,
    device_figures: Mapping[str, Any] | None = None,
    state_trees: Mapping[str, Any] | None = None,
    trace_figures: Mapping[str, Any] | None = None,
) -> Reconciliation:
    """Combines a ledger with measured figures; columns that were not measured are Unknown.

    Args:
      ledger: Source of the formula column.
      compiled_figures: Result of `ledger.compiled.inspection.figures`.
      device_figures: {"peak": bytes or Unknown}, as from `ledger.device.peak_bytes`.
      state_trees: Live state: {"weights": tree, "optimizer": tree, "state": everything that persists}.
      trace_figures: Result of `ledger.trace.figures`.
    """

    def state_bytes(*kinds: str) -> int:
        return sum(ledger.kind_bytes(kind, phase) for kind in kinds for phase in (PERSISTENT, HOST))

    # Shapes and sizes of live arrays do not include TPU tile padding.
    not_in_arrays = ledger.kind_bytes("activations", HOST) + ledger.kind_bytes("tile padding")
    formula: dict[str, Figure] = {
        "weights": state_bytes("weights", "master weights"),
        "optimizer": state_bytes("optimizer"),
        "persistent": ledger.persistent_bytes + ledger.host_bytes - not_in_arrays,
        "activations": ledger.kind_bytes("activations", BOUNDARY),
        "peak": ledger.peak_bytes,
    }
    compiled = compiled_figures or {}
    not_compiled = Unknown("nothing was compiled")
    in_program = Unknown("XLA reports a program's arguments as one sum, batch included")
    compiled_column: dict[str, Figure] = dict.fromkeys(EXACT, in_program if compiled else not_compiled)
    in_temporaries = Unknown("XLA reports a program's temporaries as one sum")
    compiled_column["activations"] = in_temporaries if compiled else not_compiled
    compiled_column["peak"] = compiled.get("peak", not_compiled)

    device: dict[str, Figure] = {name: Unknown("no live state was given") for name in EXACT}
    for name, tree in (state_trees or {}).items():
        device["persistent" if name == "state" else name] = device_lib.tree_bytes(tree)
    device["activations"] = Unknown("a device does not report what is live in the middle of a step")
    device["peak"] = (device_figures or {}).get("peak", Unknown("no device was measured"))

    not_traced = Unknown("nothing was traced")
    traced = trace_figures or {}
    figures = []
    for name in FIGURES:
        columns = {
            "formula": formula[name],
            "trace": traced.get(name, not_traced),
            "compiled": compiled_column[name],
            "device": device[name],
        }
        figures.append(ReconciledFigure(name, columns))
    return Reconciliation(ledger, tuple(figures))
