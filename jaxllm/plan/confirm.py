"""Compiles the best candidates of a plan with XLA, records the compiler's peaks, and drops those that do not fit."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import jax

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.decode.generate import DECODE_STEPS, PREFILL_CHUNK
from jaxllm.errors import RunError, UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger.compiled import absent, inspection
from jaxllm.ledger.compiled.inspection import Inspection, SamplingSpec, task_programs
from jaxllm.ledger.rows import Unknown, format_bytes
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.plan import inference
from jaxllm.plan.inference import InferenceEstimate, InferenceResult
from jaxllm.plan.request import EstimateT
from jaxllm.plan.training import TrainingEstimate, TrainingResult

# Maximum compilations per candidate to confirm. If that many are rejected, the formulas are wrong.
ATTEMPTS = 8

# Compiles a run's programs, or those of sampling; returns the compiler's figures by program name.
Compile = Callable[[Config, SamplingSpec | None], Mapping[str, Inspection]]


@dataclasses.dataclass(frozen=True)
class Confirmation(Generic[EstimateT]):
    """Outcome of compiling the best candidates with XLA.

    Attributes:
      compiled: (candidate, peak in bytes as compiled) of those that fit, in the plan's order.
      dropped: (candidate, reason) of those that do not fit.
    """

    compiled: tuple[tuple[EstimateT, int], ...] = ()
    dropped: tuple[tuple[EstimateT, str], ...] = ()

    def remaining(self, fitting: Sequence[EstimateT]) -> tuple[EstimateT, ...]:
        """Returns the candidates without the dropped ones."""
        dropped = {estimate.choice for estimate, _ in self.dropped}
        return tuple(estimate for estimate in fitting if estimate.choice not in dropped)


def compiler(name: str, device: Device, count: int) -> Compile:
    """Returns a function that compiles the programs of a run for `count` devices named by `--device`.

    Args:
      name: value of `--device`; "auto" compiles for the devices attached here.
      device: the device that it names.

    Raises:
      UserError: no compiler for the device is available, or too few devices are attached.
    """
    if name != "auto":
        absent.require_compiler(device.name, device.compile_target).topology(count)
        return lambda config, sampling: absent.inspect(config, name, count, sampling)
    if count > jax.device_count():
        raise UserError(
            f"this machine has {jax.device_count()} device(s), and the plan is for {count}; name them with --device"
        )

    def compile_attached(config: Config, sampling: SamplingSpec | None) -> dict[str, Inspection]:
        model = architectures.resolve_config(config)
        mesh = mesh_lib.make_mesh(sampling.mesh.config if sampling else config.mesh)
        programs = task_programs(config, model, device.platform, mesh, sampling)
        return {name: inspection.inspect(program.compile) for name, program in programs.items()}

    return compile_attached


def confirm_training(result: TrainingResult, wanted: int, compile_for: Compile) -> Confirmation[TrainingEstimate]:
    """Compiles training candidates in order until `wanted` of them fit; those that do not fit are dropped.

    Raises:
      RunError: none of the compiled candidates fits.
    """

    def compile_one(estimate: TrainingEstimate) -> Mapping[str, Inspection]:
        return compile_for(result.space.configured(estimate.choice), None)

    return _confirm(result.fitting, wanted, result.device, compile_one)


def confirm_inference(
    result: InferenceResult, config: Config, wanted: int, compile_for: Compile
) -> Confirmation[InferenceEstimate]:
    """Compiles sampling candidates in order until `wanted` of them fit; skips formats without a program.

    Args:
      config: names the model.

    Raises:
      RunError: none of the compiled candidates fits.
    """
    fitting = [each for each in result.fitting if inference.has_program(each.choice, result.device, result.space.model)]

    def compile_one(estimate: InferenceEstimate) -> Mapping[str, Inspection]:
        choice = estimate.choice
        chunk = min(PREFILL_CHUNK, choice.context)
        sizes = (choice.batch, choice.context, chunk, DECODE_STEPS, choice.cache, choice.mesh, choice.weights)
        return compile_for(config, SamplingSpec(*sizes))

    return _confirm(fitting, wanted, result.device, compile_one)


def _confirm(
    fitting: Sequence[EstimateT],
    wanted: int,
    device: Device,
    compile_one: Callable[[EstimateT], Mapping[str, Inspection]],
) -> Confirmation[EstimateT]:
    compiled: list[tuple[EstimateT, int]] = []
    dropped: list[tuple[EstimateT, str]] = []
    assert device.memory_bytes is not None
    for estimate in fitting[: wanted * ATTEMPTS]:
        if len(compiled) == wanted:
            break
        peak = _peak(compile_one(estimate))
        # Compared with the full capacity: the budget's margin covers the formula's error, and this figure has none.
        if isinstance(peak, int) and peak <= device.memory_bytes:
            compiled.append((estimate, peak))
        else:
            formula, capacity = format_bytes(estimate.peak_bytes), format_bytes(device.memory_bytes)
            by_compiler = f"compiled {format_bytes(peak)}" if isinstance(peak, int) else peak
            dropped.append((estimate, f"formula {formula}, {by_compiler}, of {capacity}"))
    if wanted and fitting and not compiled:
        raise RunError(f"none of the best {len(dropped)} candidates fits when compiled; the first: {dropped[0][1]}")
    return Confirmation(tuple(compiled), tuple(dropped))


def _peak(inspections: Mapping[str, Inspection]) -> int | str:
    """Returns the largest peak among the programs, or the reason why one is unknown or was rejected by the compiler."""
    peaks: list[int] = []
    for compiled in inspections.values():
        peak = compiled.figures["peak"]
        if compiled.oom_message:
            return f"rejected by the compiler ({compiled.oom_message})"
        if isinstance(peak, Unknown):
            return f"unknown to the compiler ({peak.why})"
        peaks.append(peak)
    return max(peaks)
