"""Plans training from request to output: searches, confirms with XLA, and suggests changes if nothing fits."""

import pathlib
from typing import Any

from jaxllm.errors import UserError
from jaxllm.ledger import bill
from jaxllm.plan import confirm, overrides, remedies, render, told, training
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.request import Output, PlanRequest, compiler
from jaxllm.plan.space import SearchSpace


def train(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Plans a training run, prints the plan and returns it as JSON."""
    found = search(request)
    render.show_counts(found, request.margin, output.console)
    if not found.fitting:
        return told.training_json(found, Confirmation(), output.top, None) | {
            "nothing_fits": _remedies(found, request, output)
        }
    wanted, compile_for = compiler(request, request.count, output)
    made: Confirmation[training.Verdict] = Confirmation()
    if compile_for is not None:
        made = confirm.confirm_training(found, wanted, compile_for)
    render.show_training(found, made, output.top, output.console)
    best = made.remaining(found.fitting)[0].choice
    values = overrides.arguments(overrides.fields(found.space, best, request.typed))
    chosen = found.space.configured(best)
    on = f"{request.count} × {request.device.name}"
    file, typed = request.file or "FILE.py", values
    if request.out is not None:
        _write(request.out, overrides.file_of(found.space, best, f"{request.name} on {on}, as jaxllm.plan chose it."))
        file, typed = str(request.out), []
    device = [] if request.device_name == "auto" else [f"--device={request.device_name}"]
    commands = [
        ["python", "-m", "jaxllm.ledger", "--config", file, *device, *typed],
        ["python", "-m", "jaxllm.train", "--config", file, *typed],
    ]
    if file == "FILE.py":
        output.say("FILE.py: any whose get_config() returns Config(); --out FILE.py writes one that has it all")
    render.show_commands(commands, output.console)
    ledger = bill.training(chosen, request.model, request.device)
    return told.training_json(found, made, output.top, {"overrides": values, "ledger": ledger.to_json()}) | {
        "nothing_fits": None
    }


def search(request: PlanRequest) -> training.Search:
    """Evaluates the training runs that match the request.

    Raises:
      UserError: the sequences per step do not divide over the devices on any mesh.
    """
    space = SearchSpace(
        base=request.config,
        model=request.model,
        count=request.count,
        platform=request.device.platform,
        precisions=request.precisions,
        moments=request.moments,
    )
    found = training.search(space, request.device, request.budget)
    if not found.judged:
        batch, count = request.config.train.batch_size, request.count
        raise UserError(
            f"{batch} sequences a step do not divide over {count} devices, whatever the mesh; "
            f"the next number that does: {-(-batch // count) * count}"
        )
    return found


def _remedies(found: training.Search, request: PlanRequest, output: Output) -> dict[str, Any] | None:
    if found.closest is None:
        raise UserError(f"no array of {request.name} can be split over any mesh of {request.count} devices")
    choice = found.closest[0]
    ledger = training.ledger_of(found.space, choice)
    helping = remedies.remedies(found, request.margin, bool(request.file))
    render.show_nothing_fits(choice.summary, ledger, request.budget, helping, output.console)
    return told.nothing_json(choice.fields, ledger, request.budget, helping)


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
