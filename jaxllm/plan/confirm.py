"""Compiles the best candidates of a plan with XLA, records the compiler's peaks, and drops those that do not fit."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import jax

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.engine import generator
from jaxllm.errors import RunError, UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger.compiled import absent
from jaxllm.ledger.compiled import attached as compiled
from jaxllm.ledger.compiled.attached import Inspection
from jaxllm.ledger.compiled.task_programs import SamplingSpec, programs_of
from jaxllm.ledger.rows import Unknown, format_bytes
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.plan import inference, training

# Maximum compilations per candidate to confirm. If that many are rejected, the formulas are wrong.
ATTEMPTS = 8

V = TypeVar("V", training.Verdict, inference.Verdict)
# Compiles a run's programs, or those of sampling; returns the compiler's figures by program name.
Compile = Callable[[Config, SamplingSpec | None], Mapping[str, Inspection]]


@dataclasses.dataclass(frozen=True)
class Confirmation(Generic[V]):
    """Outcome of compiling the best candidates.

    Attributes:
      compiled: (candidate, peak in bytes as compiled) of those that fit, in the plan's order.
      dropped: (candidate, reason) of those that do not fit.
    """

    compiled: tuple[tuple[V, int], ...] = ()
    dropped: tuple[tuple[V, str], ...] = ()

    def remaining(self, fitting: Sequence[V]) -> tuple[V, ...]:
        """Returns the candidates without the dropped ones."""
        gone = {verdict.choice for verdict, _ in self.dropped}
        return tuple(verdict for verdict in fitting if verdict.choice not in gone)


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
        raise UserError(f"this machine has {jax.device_count()} device(s), and the plan is for {count}")

    def here(config: Config, sampling: SamplingSpec | None) -> dict[str, Inspection]:
        model = architectures.resolve_config(config)
        over = absent.abstract_mesh(config) if sampling else mesh_lib.make_mesh(config.mesh)
        made = programs_of(config, model, device.platform, over, sampling)
        return {program: compiled.inspect(made[program].compile) for program in made}

    return here


def confirm_training(found: training.Search, wanted: int, compile_for: Compile) -> Confirmation[training.Verdict]:
    """Compiles training candidates in order until `wanted` of them fit; those that do not fit are dropped.

    Raises:
      RunError: none of the compiled candidates fits.
    """
    return _confirm(
        found.fitting, wanted, found.device, lambda verdict: compile_for(found.space.configured(verdict.choice), None)
    )


def confirm_inference(
    found: inference.Search, config: Config, wanted: int, compile_for: Compile
) -> Confirmation[inference.Verdict]:
    """Compiles sampling candidates in order until `wanted` of them fit; skips formats without a program.

    Args:
      config: names the model.

    Raises:
      RunError: none of the compiled candidates fits.
    """
    fitting = [each for each in found.fitting if inference.has_program(each.choice, found.device)]

    def compile_one(verdict: inference.Verdict) -> Mapping[str, Inspection]:
        choice = verdict.choice
        chunk = min(generator.CHUNK, choice.context)
        return compile_for(config, SamplingSpec(choice.batch, choice.context, chunk, generator.STEPS, choice.cache))

    return _confirm(fitting, wanted, found.device, compile_one)


def _confirm(
    fitting: Sequence[V], wanted: int, device: Device, compile_one: Callable[[V], Mapping[str, Inspection]]
) -> Confirmation[V]:
    made: list[tuple[V, int]] = []
    dropped: list[tuple[V, str]] = []
    assert device.memory_bytes is not None
    for verdict in fitting[: wanted * ATTEMPTS]:
        if len(made) == wanted:
            break
        peak = _peak(compile_one(verdict))
        # Compared with the full capacity: the budget's margin covers the formula's error, and this figure has none.
        if isinstance(peak, int) and peak <= device.memory_bytes:
            made.append((verdict, peak))
        else:
            told = f"compiled {format_bytes(peak)}" if isinstance(peak, int) else peak
            formula, has = format_bytes(verdict.peak_bytes), format_bytes(device.memory_bytes)
            dropped.append((verdict, f"formula {formula}, {told}, of {has}"))
    if wanted and fitting and not made:
        raise RunError(f"none of the best {len(dropped)} fits as XLA compiles it; the first: {dropped[0][1]}")
    return Confirmation(tuple(made), tuple(dropped))


def _peak(inspections: Mapping[str, Inspection]) -> int | str:
    """Returns the largest peak among the programs, or the reason why it is unknown or the compiler refused one."""
    peaks: list[int] = []
    for inspection in inspections.values():
        peak = inspection.figures["peak"]
        if inspection.oom_message:
            return f"refused by the compiler ({inspection.oom_message})"
        if isinstance(peak, Unknown):
            return f"unknown to the compiler ({peak.why})"
        peaks.append(peak)
    return max(peaks)
