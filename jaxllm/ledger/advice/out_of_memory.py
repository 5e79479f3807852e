"""Memory that ran out: how that is recognised, and what a person is told of it.

What backends say (JAX 0.10.2 and 0.12.0.1):

| where | what is raised |
|---|---|
| TPU and GPU compilers | RESOURCE_EXHAUSTED, with the size of the program and of the device |
| allocators of all three platforms | RESOURCE_EXHAUSTED: Out of memory allocating N bytes |
| scratch of fused products on a CPU, 0.12 | INTERNAL: YNNPACK operation failed, and nothing of memory |
| Python and NumPy on the host | MemoryError |

The allocation that fails is the last straw, often a small one, and tells nothing of the load. So the message is the
bill. A CPU whose system promises more memory than it has may kill the process instead; nothing can be said then.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

from jaxllm.errors import RunError
from jaxllm.ledger.compiled import attached
from jaxllm.ledger.rows import PERSISTENT, Figure, Ledger, Unknown, format_bytes

_SIGNS = ("RESOURCE_EXHAUSTED", "Out of memory", "YNNPACK operation failed")
_ROWS = 5  # that a message names


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or on the host."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(sign in str(error) for sign in _SIGNS)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def explained(explain: Callable[[BaseException], str]) -> Iterator[None]:
    """Where memory runs out in the block, ends the run with what `explain` says of it.

    Raises:
      RunError: memory ran out.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise RunError(explain(error)) from error


def largest_rows(ledger: Ledger) -> str:
    """The largest rows of the peak: `gradients 4.00 GiB, logits 2.00 GiB, …`."""
    alive = [row for row in ledger.rows if row.phase in (PERSISTENT, ledger.peak_phase)]
    alive.sort(key=lambda row: -row.bytes_per_device)
    return ", ".join(f"{row.name} {format_bytes(row.bytes_per_device)}" for row in alive[:_ROWS])


def told(error: BaseException) -> str:
    """The first sentence of an exception, in one line."""
    if isinstance(error, MemoryError):
        return f"MemoryError: {error}" if str(error) else "MemoryError"
    text = str(error)
    return attached.refusal(text, 0.0).refused if _SIGNS[0] in text else " ".join(text.split())[:200]


def message(doing: str, error: BaseException, ledger: Ledger, held_by_others: Figure, *more: str) -> str:
    """The block that a person reads.

    Args:
      doing: what could not be done, `in step 3`.
      error: of which `is_shortage` holds.
      ledger: of the task; its capacity is what the device had for it.
      more: lines to end with: the change that would fit, the checkpoint.
    """
    needs, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    lines = [f"out of memory {doing}: {told(error)}", f"predicted peak: {needs} on one device ({ledger.peak_phase})"]
    if isinstance(capacity, Unknown):
        lines[-1] += f"; what the device has is unknown: {capacity.why}"
    else:
        lines[-1] += f"; the device has {format_bytes(capacity)} for it"
    by_compiler = attached.refusal(str(error), 0.0).figures["peak"]
    if not isinstance(by_compiler, Unknown):
        lines.append(f"the compiler's own figure: {format_bytes(by_compiler)}")
    lines.append(f"largest rows: {largest_rows(ledger)}")
    why = f" ({held_by_others.why})" if isinstance(held_by_others, Unknown) else ""
    lines.append(f"held by others on the device: {format_bytes(held_by_others)}{why}")
    return "\n  ".join((*lines, *more))
