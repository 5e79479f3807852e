"""Checks a ledger's peak against XLA's within the error that was measured for that program, in per cent.

Tables of programs give the least and the largest error allowed: the measured one rounded away from zero, and usually 2
on the other side. Both figures are deterministic, so a larger error is a change of a formula or of XLA.
"""

from jaxllm.ledger.rows import PERSISTENT, Ledger


def assert_near(ledger: Ledger, phase: str, xla: int, allowed: tuple[float, float], caught: bool = True) -> None:
    """Checks the peak of a phase, and plants a fault: without one row of some 8 % of it, the error is not allowed.

    Args:
      ledger: The bill.
      phase: Phase whose bytes, with the persistent ones, are the peak.
      xla: XLA's peak.
      allowed: Least and largest error in per cent.
      caught: False if the bill is so much too high that it is still allowed without that row.
    """
    least, largest = allowed
    bill = ledger.persistent_bytes + ledger.phase_bytes(phase)
    assert least < 100 * (bill / xla - 1) < largest, f"{bill / xla - 1:+.2%}: formula {bill:,} B, XLA {xla:,} B"
    rows = [row.bytes_per_device for row in ledger.rows if row.phase in (PERSISTENT, phase)]
    forgotten = min((size for size in rows if size > 0.07 * bill), key=lambda size: abs(size / bill - 0.08))
    assert (100 * ((bill - forgotten) / xla - 1) < least) == caught, f"without {forgotten / bill:.1%} of the peak"
