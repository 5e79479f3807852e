"""Aggregation of a bill for plots and comparisons: bytes by group, in each phase of a step or a request."""

import dataclasses

from jaxllm.ledger.rows import HOST, KINDS, PERSISTENT, PHASES, Ledger

# Group -> colour. Okabe & Ito 2008: distinguishable with any colour vision, on white and on black.
COLOURS: dict[str, str] = {
    "weights": "#0072b2",
    "gradients": "#d55e00",
    "optimizer states": "#56b4e9",
    "activations": "#009e73",
    "logits and loss": "#e69f00",
    "KV cache": "#cc79a7",
    "workspace": "#999999",
}
GROUPS = tuple(COLOURS)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Memory of one device in one phase, by group.

    Attributes:
      name: one of `rows.PHASES`; "persistent" is the memory kept between steps or requests.
      groups: group -> bytes, persistent memory included, in the order of GROUPS; empty groups are absent.
    """

    name: str
    groups: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.groups.values())


def phases(ledger: Ledger) -> tuple[Phase, ...]:
    """Returns the persistent phase, then each phase with rows, in execution order."""
    present = {row.phase for row in ledger.rows}
    names = [name for name in PHASES if name in present and name not in (PERSISTENT, HOST)]
    return tuple(Phase(name, _groups(ledger, {PERSISTENT, name})) for name in (PERSISTENT, *names))


def at_peak(ledger: Ledger) -> dict[str, int]:
    """Returns group -> bytes in the peak phase; their sum is the peak."""
    return _groups(ledger, {PERSISTENT, ledger.peak_phase})


def _groups(ledger: Ledger, alive: set[str]) -> dict[str, int]:
    sums = dict.fromkeys(GROUPS, 0)
    for row in ledger.rows:
        if row.phase in alive:
            sums[KINDS[row.kind]] += row.bytes_per_device
    return {group: size for group, size in sums.items() if size}
