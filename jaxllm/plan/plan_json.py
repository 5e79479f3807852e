"""JSON form of plans: one object per plan."""

from collections.abc import Sequence
from typing import Any

from jaxllm.ledger.advice.remedies import Remedy
from jaxllm.ledger.rows import Ledger
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.inference import InferenceEstimate, InferenceResult
from jaxllm.plan.render import LARGEST
from jaxllm.plan.training import TrainingEstimate, TrainingResult


def training_json(
    result: TrainingResult,
    confirmation: Confirmation[TrainingEstimate],
    top: int,
    best: dict[str, Any] | None,
    nothing_fits: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a training plan as a JSON object.

    Args:
      result: of the search.
      confirmation: XLA's peaks, and the candidates dropped because of them.
      top: maximum number of candidates to include.
      best: the winner's overrides and ledger; None if nothing fits.
      nothing_fits: output of `nothing_fits_json`; None if a candidate fits.
    """
    base = result.space.base
    tokens = base.train.batch_size * base.data.sequence_length
    peaks = {estimate.choice: peak for estimate, peak in confirmation.compiled}
    candidates = [
        {
            "fields": estimate.choice.fields,
            "peak_bytes_per_device": estimate.peak_bytes,
            "compiled_peak_bytes": peaks.get(estimate.choice),
            "step_seconds": estimate.seconds if estimate.seconds < float("inf") else {"unknown": estimate.unknown},
            "tokens_per_second": tokens / estimate.seconds,
            "bound": estimate.bound,
            "without": estimate.unknown or None,
        }
        for estimate in confirmation.remaining(result.fitting)[:top]
    ]
    return {
        "task": "train",
        "model": base.model.name,
        "device": result.device.name,
        "count": result.space.count,
        "tokens_per_step": tokens,
        **_counts(result),
        "candidates": candidates,
        "dropped": [{"fields": estimate.choice.fields, "why": why} for estimate, why in confirmation.dropped],
        "best": best,
        "nothing_fits": nothing_fits,
    }


def inference_json(
    result: InferenceResult,
    confirmation: Confirmation[InferenceEstimate],
    top: int,
    best: dict[str, Any] | None,
    nothing_fits: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns an inference plan as a JSON object. Arguments as in `training_json`."""
    peaks = {estimate.choice: peak for estimate, peak in confirmation.compiled}
    candidates = [
        {
            **estimate.choice.fields,
            "peak_bytes": estimate.peak_bytes,
            "compiled_peak_bytes": peaks.get(estimate.choice),
            "token_seconds": {"unknown": estimate.unknown} if estimate.unknown else estimate.seconds,
            "tokens_per_second": {"unknown": estimate.unknown} if estimate.unknown else estimate.tokens_per_second,
            "prefill_seconds": {"unknown": estimate.unknown} if estimate.unknown else estimate.prefill_seconds,
            "bound": estimate.bound,
        }
        for estimate in confirmation.remaining(result.fitting)[:top]
    ]
    return {
        "task": "infer",
        "model": result.space.name,
        "device": result.device.name,
        "count": 1,
        **_counts(result),
        "candidates": candidates,
        "dropped": [{"choice": estimate.choice.summary, "why": why} for estimate, why in confirmation.dropped],
        "best": best,
        "nothing_fits": nothing_fits,
    }


def nothing_fits_json(closest: Any, ledger: Ledger, budget: int, remedies: Sequence[Remedy]) -> dict[str, Any]:
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
        "largest_rows": [{"name": row.name, "bytes": row.bytes_per_device} for row in ledger.largest_rows(LARGEST)],
        "remedies": [
            {"what": remedy.description, "flags": remedy.flags, "peak_bytes": remedy.peak_bytes} for remedy in remedies
        ],
    }


def _counts(result: TrainingResult | InferenceResult) -> dict[str, Any]:
    return {
        "capacity_bytes": result.device.memory_bytes,
        "budget_bytes": result.budget,
        "judged": result.evaluated,
        "fit": len(result.fitting),
        "seconds": result.seconds,
    }
