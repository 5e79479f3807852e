"""Plans training, inference or both: searches, confirms with XLA, prints the plan, and gives advice if nothing fits."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.ledger import bill
from jaxllm.ledger.advice.remedies import Remedy
from jaxllm.ledger.rows import Ledger
from jaxllm.plan import confirm, inference, plan_json, remedies, render, training
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.inference import InferenceChoice, InferenceEstimate, InferenceResult, InferenceSpace
from jaxllm.plan.render import Output
from jaxllm.plan.request import PlanRequest
from jaxllm.plan.training import TrainingEstimate, TrainingResult
from jaxllm.plan.training_space import TrainingChoice, TrainingSpace, override_flags


def plan_training(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Plans a training run, prints the plan and returns it as JSON."""
    result = _search_training(request)
    render.show_counts(result, request.margin, output)
    confirmation: Confirmation[TrainingEstimate] = Confirmation()
    if not result.fitting:
        ledger = training.ledger_of(result.space, result.best)
        advice = remedies.training_remedies(result, request.margin, bool(request.file))
        nothing = _show_nothing_fits(result.best, ledger, request.budget, advice, output)
        return plan_json.training_json(result, confirmation, output.top, None, nothing)
    wanted, compile_for = _compiler(request, request.count, output)
    if compile_for is not None:
        confirmation = confirm.confirm_training(result, wanted, compile_for)
    render.show_training(result, confirmation, output)
    best = confirmation.remaining(result.fitting)[0].choice
    overrides = override_flags(result.space.overrides(best, request.typed))
    if request.out is not None:
        title = f"{request.name} on {request.count} × {request.device.name}, as jaxllm.plan chose it."
        _write(request.out, result.space.config_file(best, title))
        file, typed = str(request.out), []
    else:
        file, typed = request.file or "FILE.py", overrides
    if file == "FILE.py":
        output.say("FILE.py: any file whose get_config() returns Config(); --out=FILE.py writes a complete one")
    commands = [
        ["python", "-m", "jaxllm.ledger", "--config", file, *_device_flags(request), *typed],
        ["python", "-m", "jaxllm.train", "--config", file, *typed],
    ]
    render.show_commands(commands, output)
    ledger = bill.training(result.space.configured(best), request.model, request.device)
    chosen = {"overrides": overrides, "ledger": ledger.to_json()}
    return plan_json.training_json(result, confirmation, output.top, chosen)


def plan_inference(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Plans inference, prints the plan and returns it as JSON."""
    result = _search_inference(request, request.batch)
    render.show_counts(result, request.margin, output)
    confirmation: Confirmation[InferenceEstimate] = Confirmation()
    if not result.fitting:
        ledger = inference.ledger_of(result.space, request.device, result.best)
        advice = remedies.inference_remedies(result, request.margin)
        nothing = _show_nothing_fits(result.best, ledger, request.budget, advice, output)
        return plan_json.inference_json(result, confirmation, output.top, None, nothing)
    if not inference.has_program(best := result.best, request.device, request.model):
        output.say(f"not compiled: the decoder does not support this yet: {best.summary}")
    else:
        wanted, compile_for = _compiler(request, request.count, output)
        if compile_for is not None:
            confirmation = confirm.confirm_inference(result, request.config, wanted, compile_for)
    render.show_inference(result, confirmation, output)
    best = confirmation.remaining(result.fitting)[0].choice
    names = ("batch", "context", "weights", "cache", *(("mesh",) if best.mesh.count > 1 else ()))
    flags = [f"--{name}={best.fields[name]}" for name in names]
    named = {"model.name": request.config.model.name} if request.typed is None else request.typed
    if not request.file:
        output.say("FILE.py: any file whose get_config() returns Config()")
    command = ["python", "-m", "jaxllm.ledger", "--config", request.file or "FILE.py", "--task=infer"]
    render.show_commands([[*command, *_device_flags(request), *flags, *override_flags(named)]], output)
    ledger = inference.ledger_of(result.space, request.device, best)
    return plan_json.inference_json(result, confirmation, output.top, {"flags": flags, "ledger": ledger.to_json()})


def plan_both(request: PlanRequest, output: Output) -> dict[str, Any]:
    """Prints what training and inference each need, with the flags for a full plan, and returns both bills as JSON."""
    trained, sampled = _search_training(request), _search_inference(request, request.batch or 1)
    train_ledger = bill.training(trained.space.configured(trained.best), request.model, request.device)
    infer_ledger = inference.ledger_of(sampled.space, request.device, sampled.best)
    render.show_bills(train_ledger, infer_ledger, request.device, output)
    is_file = bool(request.file)
    train_advice = [] if trained.fitting else remedies.training_remedies(trained, request.margin, is_file)
    infer_advice = [] if sampled.fitting else remedies.inference_remedies(sampled, request.margin)
    for task, fits, choice, advice in (
        ("training", trained.fitting, trained.best, train_advice),
        ("inference", sampled.fitting, sampled.best, infer_advice),
    ):
        output.say(f"{task}{', fastest choice' if fits else ' does not fit; closest choice'}: {choice.summary}")
        for remedy in advice[:2]:
            output.say(f"  would fit with {remedy}")
    output.say("next: --task train [--device … --count … --batch_tokens … --sequence_length …]")
    output.say("   or --task infer [--device … --batch … --context …]")
    return {"task": "both", "train": train_ledger.to_json(), "infer": infer_ledger.to_json()}


def _search_training(request: PlanRequest) -> TrainingResult:
    """Evaluates the training runs that match the request.

    Raises:
      UserError: the sequences per step do not divide over the devices on any mesh, or no mesh can shard the model.
    """
    space = TrainingSpace(
        base=request.config,
        model=request.model,
        count=request.count,
        platform=request.device.platform,
        precisions=request.precisions,
        moments=request.moments,
    )
    result = training.search(space, request.device, request.budget)
    if not result.evaluated:
        batch, count = request.config.train.batch_size, request.count
        raise UserError(
            f"{batch} sequences per step do not divide over {count} devices on any mesh; "
            f"the next batch size that does: {-(-batch // count) * count}"
        )
    if not result.fitting and result.closest is None:
        raise UserError(f"no mesh of {request.count} devices can shard the arrays of {request.name}; change --count")
    return result


def _search_inference(request: PlanRequest, batch: int | None) -> InferenceResult:
    """Evaluates the sampling setups that match the request, with `batch` sequences or, for None, any number."""
    space = InferenceSpace(
        name=request.name,
        model=request.model,
        context=request.context,
        weights=inference.weight_formats(request.device) if request.weights == "search" else (request.weights,),
        caches=inference.cache_formats(request.device) if request.cache == "search" else (request.cache,),
        batch=batch,
        count=request.count,
    )
    return inference.search(space, request.device, request.budget)


def _show_nothing_fits(
    choice: TrainingChoice | InferenceChoice, ledger: Ledger, budget: int, advice: Sequence[Remedy], output: Output
) -> dict[str, Any]:
    render.show_nothing_fits(choice.summary, ledger, budget, advice, output)
    return plan_json.nothing_fits_json(choice.fields, ledger, budget, advice)


def _compiler(request: PlanRequest, count: int, output: Output) -> tuple[int, confirm.Compile | None]:
    """Returns (number of candidates to compile, compile function); (0, None) if nothing is to be compiled.

    Raises:
      UserError: `--confirm` is positive and no compiler for the device is available.
    """
    if request.confirm == 0:
        return 0, None
    try:
        compile_for = confirm.compiler(request.device_name, request.device, count)
    except UserError as error:
        if request.confirm:
            raise
        output.say(f"not compiled: {error}")
        return 0, None
    return request.confirm or 1, compile_for


def _device_flags(request: PlanRequest) -> list[str]:
    return [] if request.device_name == "auto" else [f"--device={request.device_name}"]


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error
