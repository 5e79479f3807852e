"""Detects out-of-memory (OOM) errors and reports them with the predicted bill.

Errors raised by backends (JAX 0.10.2 and 0.12.0.1):

| source | error |
|---|---|
| TPU and GPU compilers | RESOURCE_EXHAUSTED, with the sizes of the program and the device |
| allocators of all three platforms | RESOURCE_EXHAUSTED: Out of memory allocating N bytes |
| scratch memory of fused CPU matmuls, JAX 0.12 | INTERNAL: YNNPACK operation failed, without mention of memory |
| Python and NumPy on the host | MemoryError |

The allocation that fails is often small and does not show what fills the memory, so the message shows the bill. On a
CPU with memory overcommit the operating system may kill the process instead, without a message.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

from jaxllm.errors import RunError
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.rows import Figure, Ledger, Unknown, format_bytes

_MARKERS = ("RESOURCE_EXHAUSTED", "Out of memory", "YNNPACK operation failed")
_ROWS = 5  # number of rows that a message lists


def is_oom(error: BaseException) -> bool:
    """Returns True if an exception is an out-of-memory error of the device or the host."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(marker in str(error) for marker in _MARKERS)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def explained(explain: Callable[[BaseException], str]) -> Iterator[None]:
    """Context manager that converts an out-of-memory error into a RunError with the message of `explain`.

    Raises:
      RunError: The block ran out of memory.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise RunError(explain(error)) from error


def oom_text(error: BaseException) -> str:
    """Returns the first sentence of an exception, on one line of at most 200 characters."""
    if isinstance(error, MemoryError):
        return f"MemoryError: {error}" if str(error) else "MemoryError"
    text = str(error)
    return inspection.oom_inspection(text, 0.0).oom_message if _MARKERS[0] in text else " ".join(text.split())[:200]


def message(doing: str, error: BaseException, ledger: Ledger, used_by_others: Figure, *more: str) -> str:
    """Formats the out-of-memory message.

    Args:
      doing: Where memory ran out: `in step 3`.
      error: Exception for which `is_oom` is true.
      ledger: Ledger of the task, with the memory that was available to it as capacity.
      used_by_others: Bytes on the device that are not arrays of this process.
      more: Last lines of the message: the change that would fit, the checkpoint.
    """
    peak, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    lines = [
        f"out of memory {doing}: {oom_text(error)}",
        f"predicted peak: {peak} on one device ({ledger.peak_phase})",
    ]
    if isinstance(capacity, Unknown):
        lines[-1] += f"; the available memory is unknown: {capacity.why}"
    else:
        lines[-1] += f"; {format_bytes(capacity)} is available"
    by_compiler = inspection.oom_inspection(str(error), 0.0).figures["peak"]
    if not isinstance(by_compiler, Unknown):
        lines.append(f"peak reported by the compiler: {format_bytes(by_compiler)}")
    largest = (f"{row.name} {format_bytes(row.bytes_per_device)}" for row in ledger.largest_rows(_ROWS))
    lines.append(f"largest rows: {', '.join(largest)}")
    why = f" ({used_by_others.why})" if isinstance(used_by_others, Unknown) else ""
    lines.append(f"used by others on the device: {format_bytes(used_by_others)}{why}")
    return "\n  ".join((*lines, *more))
