"""Plans inference from request to output: searches, confirms with XLA, and suggests changes if nothing fits."""

import dataclasses
from typing import Any

from jaxllm.errors import UserError
from jaxllm.plan import confirm, inference, overrides, render, told
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.request import Output, PlanRequest, compiler


def infer(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Plans inference on one device, prints the plan and returns it as JSON.

    Raises:
      UserError: the request has several devices and no config file.
    """
    if request.count != 1 and not request.file:
        raise UserError(f"--task infer is planned for one device, and --count is {request.count}")
    found = search(request)
    render.show_counts(found, request.margin, output.console)
    if not found.fitting:
        return told.inference_json(found, Confirmation(), output.top, None) | {
            "nothing_fits": _remedies(found, request, output)
        }
    made: Confirmation[inference.Verdict] = Confirmation()
    if not inference.has_program(found.fitting[0].choice, request.device):
        plain = inference.plain(request.device)
        output.say(f"not compiled: there are programs of {plain} weights alone, and the best has others")
    else:
        wanted, compile_for = compiler(request, 1, output)
        if compile_for is not None:
            made = confirm.confirm_inference(found, request.config, wanted, compile_for)
    render.show_inference(found, made, output.top, output.console)
    best = made.remaining(found.fitting)[0].choice
    values = [
        f"--batch={best.batch}",
        f"--context={best.context}",
        f"--weights={best.weights}",
        f"--cache={best.cache}",
    ]
    device = [] if request.device_name == "auto" else [f"--device={request.device_name}"]
    named = {"model.name": request.config.model.name} if request.typed is None else request.typed
    command = ["python", "-m", "jaxllm.ledger", "--config", request.file or "FILE.py", "--task=infer", *device]
    if not request.file:
        output.say("FILE.py: any whose get_config() returns Config()")
    render.show_commands([[*command, *values, *overrides.arguments(named)]], output.console)
    ledger = inference.ledger_of(request.name, request.model, request.device, best)
    return told.inference_json(found, made, output.top, {"flags": values, "ledger": ledger.to_json()}) | {
        "nothing_fits": None
    }


def search(request: PlanRequest, batches: tuple[int, ...] = ()) -> inference.Search:
    """Evaluates the sampling setups that match the request.

    Args:
      batches: numbers of concurrent sequences to try, ascending; () for the request's, or powers of two if it has none.
    """
    if not batches:
        batches = (request.batch,) if request.batch else inference.batches_up_to()
    weights = inference.formats(request.device, request.weights)
    caches = inference.formats(request.device, request.cache, of="cache")
    return inference.search(
        *(request.name, request.model, request.device, request.budget),
        contexts=(request.context,),
        batches=batches,
        weights=weights,
        caches=caches,
    )


def _remedies(found: inference.Search, request: PlanRequest, output: Output) -> dict[str, Any]:
    assert found.closest is not None
    choice = found.closest[0]
    ledger = inference.ledger_of(request.name, request.model, request.device, choice)
    helping = inference.remedies(found, request.margin)
    render.show_nothing_fits(choice.summary, ledger, request.budget, helping, output.console)
    return told.nothing_json(dataclasses.asdict(choice), ledger, request.budget, helping)
