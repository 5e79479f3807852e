"""JSON form of plans: one object per plan."""

from collections.abc import Sequence
from typing import Any

from jaxllm.ledger.rows import Ledger
from jaxllm.plan import inference, training
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.remedies import Remedy
from jaxllm.plan.render import largest_rows


def training_json(
    found: training.Search, confirmation: Confirmation[training.Verdict], top: int, best: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns a training plan as a JSON object.

    Args:
      found: the search.
      confirmation: XLA's peaks, and the candidates dropped because of them.
      top: maximum number of candidates to include.
      best: the winner's overrides and ledger; None if nothing fits.
    """
    base = found.space.base
    tokens = base.train.batch_size * base.data.sequence_length
    peaks = {verdict.choice: peak for verdict, peak in confirmation.compiled}
    candidates = [
        {
            "fields": verdict.choice.fields,
            "peak_bytes_per_device": verdict.peak_bytes,
            "compiled_peak_bytes": peaks.get(verdict.choice),
            "step_seconds": verdict.seconds if verdict.seconds < float("inf") else {"unknown": verdict.unknown},
            "tokens_per_second": tokens / verdict.seconds,
            "bound": verdict.bound,
            "without": verdict.unknown or None,
        }
        for verdict in confirmation.remaining(found.fitting)[:top]
    ]
    return {
        "task": "train",
        "model": base.model.name,
        "device": found.device.name,
        "count": found.space.count,
        "tokens_per_step": tokens,
        **_counts(found),
        "candidates": candidates,
        "dropped": [{"fields": verdict.choice.fields, "why": why} for verdict, why in confirmation.dropped],
        "best": best,
    }


def inference_json(
    found: inference.Search, confirmation: Confirmation[inference.Verdict], top: int, best: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns an inference plan as a JSON object. Arguments as in `training_json`."""
    peaks = {verdict.choice: peak for verdict, peak in confirmation.compiled}
    candidates = [
        {
            "weights": verdict.choice.weights,
            "cache": verdict.choice.cache,
            "batch": verdict.choice.batch,
            "context": verdict.choice.context,
            "peak_bytes": verdict.peak_bytes,
            "compiled_peak_bytes": peaks.get(verdict.choice),
            "token_seconds": {"unknown": verdict.unknown} if verdict.unknown else verdict.seconds,
            "tokens_per_second": {"unknown": verdict.unknown} if verdict.unknown else verdict.tokens_per_second,
            "prefill_seconds": {"unknown": verdict.unknown} if verdict.unknown else verdict.prefill_seconds,
            "bound": verdict.bound,
        }
        for verdict in confirmation.remaining(found.fitting)[:top]
    ]
    return {
        "task": "infer",
        "model": found.name,
        "device": found.device.name,
        "count": 1,
        **_counts(found),
        "candidates": candidates,
        "dropped": [{"choice": str(verdict.choice), "why": why} for verdict, why in confirmation.dropped],
        "best": best,
    }


def nothing_json(closest: Any, ledger: Ledger, budget: int, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Returns the part of a plan that explains why nothing fits.

    Args:
      closest: the closest choice, as JSON.
      ledger: its bill.
      budget: bytes available on one device.
      remedies: single changes that would fit.
    """
    return {
        "closest": closest,
        "peak_bytes_per_device": ledger.peak_bytes,
        "too_much_bytes": ledger.peak_bytes - budget,
        "largest_rows": [{"name": name, "bytes": size} for name, size in largest_rows(ledger)],
        "remedies": [{"what": r.what, "flags": r.flags, "peak_bytes": r.peak_bytes} for r in remedies],
    }


def _counts(found: training.Search | inference.Search) -> dict[str, Any]:
    return {
        "capacity_bytes": found.device.memory_bytes,
        "budget_bytes": found.budget,
        "judged": found.judged,
        "fit": len(found.fitting),
        "seconds": found.seconds,
    }
