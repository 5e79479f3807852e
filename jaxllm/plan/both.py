"""Memory of training and of inference side by side, for a plan without `--task`."""

from typing import Any

from jaxllm.errors import UserError
from jaxllm.ledger import bill
from jaxllm.plan import inference, inference_plan, remedies, render, training_plan
from jaxllm.plan.request import Output, PlanRequest


def both(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Prints what training and inference each need, with the flags for a full plan, and returns both bills as JSON.

    Raises:
      UserError: no array of the model can be sharded over any mesh of the devices.
    """
    trained = training_plan.search(request)
    sampled = inference_plan.search(request, (request.batch or 1,))
    closest = trained.fitting[0].choice if trained.fitting else trained.closest and trained.closest[0]
    if closest is None:
        raise UserError(f"no array of {request.name} can be split over any mesh of {request.count} devices")
    train_ledger = bill.training(trained.space.configured(closest), request.model, request.device)
    serving = sampled.fitting[0].choice if sampled.fitting else sampled.closest and sampled.closest[0]
    assert serving is not None
    infer_ledger = inference.ledger_of(request.name, request.model, request.device, serving)
    render.show_bills(train_ledger, infer_ledger, request.device, output.console)
    output.say(f"training, {'as it is fastest' if trained.fitting else 'does not fit; the closest'}: {closest.summary}")
    if not trained.fitting:
        for remedy in remedies.remedies(trained, request.margin, bool(request.file))[:2]:
            output.say(f"  would fit with {remedy}")
    output.say(
        f"inference, {'as it is fastest' if sampled.fitting else 'does not fit; the closest'}: {serving.summary}"
    )
    if not sampled.fitting:
        for remedy in inference.remedies(sampled, request.margin)[:2]:
            output.say(f"  would fit with {remedy}")
    output.say("next: --task train [--device … --count … --batch_tokens … --sequence_length …]")
    output.say("   or --task infer [--device … --batch … --context …]")
    return {"task": "both", "train": train_ledger.to_json(), "infer": infer_ledger.to_json()}
