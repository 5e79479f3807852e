"""A bill in few words for pictures and comparisons: its rows by group, in each phase of a step or a request."""

import dataclasses

from jaxllm.ledger.rows import HOST, PERSISTENT, PHASES, Ledger, Row

# Group -> kinds of rows. What no group names is in the last.
GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("weights", "master weights", "gathered parameters"),
    "gradients": ("gradients", "gradient accumulator"),
    "optimizer states": ("optimizer",),
    "activations": ("activations",),
    "logits and loss": ("logits and loss", "logits"),
    "KV cache": ("KV cache",),
    "workspace": (),
}
REST = "workspace"
# Group -> colour. Okabe & Ito 2008: told apart with any colour vision, on white and on black.
COLOURS: dict[str, str] = {
    "weights": "#0072b2",
    "gradients": "#d55e00",
    "optimizer states": "#56b4e9",
    "activations": "#009e73",
    "logits and loss": "#e69f00",
    "KV cache": "#cc79a7",
    "workspace": "#999999",
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """What lives in one phase on one device.

    Attributes:
      name: of `rows.PHASES`; persistent is what lives between steps or requests.
      groups: group -> bytes, persistent ones included; of GROUPS in their order, without those that are empty.
    """

    name: str
    groups: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.groups.values())


def group_of(row: Row) -> str:
    """The group of a row's kind."""
    return next((group for group, kinds in GROUPS.items() if row.kind in kinds), REST)


def phases(ledger: Ledger) -> tuple[Phase, ...]:
    """What persists, then each phase that has rows, in the order a step or a request runs through them."""
    present = {row.phase for row in ledger.rows}
    names = [name for name in PHASES if name in present and name not in (PERSISTENT, HOST)]
    return tuple(Phase(name, _groups(ledger, {PERSISTENT, name})) for name in (PERSISTENT, *names))


def at_peak(ledger: Ledger) -> dict[str, int]:
    """Group -> bytes where the device is fullest; their sum is the peak."""
    return _groups(ledger, {PERSISTENT, ledger.peak_phase})


def _groups(ledger: Ledger, alive: set[str]) -> dict[str, int]:
    sums = dict.fromkeys(GROUPS, 0)
    for row in ledger.rows:
        if row.phase in alive:
            sums[group_of(row)] += row.bytes_per_device
    return {group: size for group, size in sums.items() if size}
