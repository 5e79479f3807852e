"""Compiles the programs of a run for devices that are not there.

The compilers of the extras `cuda12` and `tpu` need no device, but they look for one when JAX starts, at length and
aloud. So they run in a process of their own, on a JAX that is told to use the CPU alone:

    python -m jaxllm.ledger.compiled.absent    request (JSON) on standard input, answer (JSON) on standard output
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxllm import architectures
from jaxllm.config import Config, overrides
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import detect
from jaxllm.hardware.compile_targets import Target
from jaxllm.ledger.compiled import attached, tpu_report
from jaxllm.ledger.compiled.attached import Inspection
from jaxllm.ledger.compiled.task_programs import Sampling, programs_of
from jaxllm.parallel import mesh
from jaxllm.programs import Program

# Where each platform's compiler lies; a CUDA one of any version will do.
_COMPILERS = {"cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "tpu": ("libtpu",)}
# Settings of the child process.
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",  # of no use where there is no TPU, and slow where there is no network
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a lock that guards the device: there is none
}


def require_compiler(device: str, target: Target | None) -> Target:
    """The target, if it can be compiled for here.

    Raises:
      UserError: nobody can say how, or the extra with the compiler is not installed.
    """
    if target is None:
        raise UserError(f"{device} is not a device that programs can be compiled for from afar; see --device")
    if not any(_is_installed(module) for module in _COMPILERS[target.platform]):
        raise UserError(
            f"compiling for {device} needs its compiler, which is not installed: pip install 'jaxllm[{target.extra}]'"
        )
    return target


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False


def inspection_for(program: Program, target: Target, count: int) -> Inspection:
    """What compiling a program for absent devices tells; its inputs as for `compile_for`."""
    if target.platform != "tpu":
        return attached.inspect(functools.partial(compile_for, program, target, count))
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_module_re": ".*"}
        return attached.inspect(
            functools.partial(compile_for, program, target, count, options),
            lambda executable: attached.figures(executable) | tpu_report.figures(pathlib.Path(folder)),
        )


def compile_for(
    program: Program, target: Target, count: int, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """The executable of a program whose inputs lie on an `AbstractMesh` of `count` devices, or on no mesh and 1 device.

    The mesh is abstract because the devices of a CUDA topology know of no memory kinds: on a mesh of them, JAX
    forgets what was to be in host memory (0.10.2), and XLA counts it as the device's.
    """
    # What lies on no mesh would be taken to lie on the CPU that JAX runs on here.
    alone = NamedSharding(AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,)), PartitionSpec())
    inputs = jax.tree.map(lambda x: x if x.sharding is not None else x.update(sharding=alone), program.inputs)
    devices: Any = topologies.get_topology_desc(**target.topology(count)).devices
    lowered = program.jitted.trace(*inputs).lower(  # type: ignore[attr-defined]
        lowering_platforms=(target.platform,)
    )
    # JAX compiles for the devices that it is given, but with the compiler of its default backend.
    lowered._lowering.compile_args["backend"] = devices[0].client
    return lowered.compile(options, device_assignment=tuple(devices[:count]))


def abstract_mesh(config: Config) -> AbstractMesh:
    """`mesh.make_mesh` without devices."""
    # Auto, as a `Mesh` is; of an abstract one JAX 0.12 would make the axes explicit.
    kinds = (AxisType.Auto,) * len(mesh.AXES)
    return AbstractMesh(tuple(mesh.sizes(config.mesh).values()), mesh.AXES, axis_types=kinds)


def inspect(config: Config, name: str, count: int, sampling: Sampling | None = None) -> dict[str, Inspection]:
    """What compiling a task's programs for absent devices tells, by program; in a process of its own.

    Args:
      name: of the device, as `hardware.detect.named` knows it.
      sampling: None for training.
    Raises:
      UserError: no such device or number of it, config.mesh takes another, or the compiler is not installed.
      RunError: the compiler failed.
    """
    device = detect.named(name)
    if sampling is None:
        mesh.require_count(config.mesh, count)
    require_compiler(device.name, device.compile_target).topology(count)
    asked = sampling and dataclasses.asdict(sampling)
    request = {"config": overrides.to_dict(config), "device": name, "count": count, "sampling": asked}
    child = subprocess.run(
        [sys.executable, "-m", "jaxllm.ledger.compiled.absent"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | QUIET,
        check=False,
    )
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        last = [line for line in child.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise RunError(f"compiling for {count} × {device.name} failed (exit {child.returncode}): {last[0]}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return {name: Inspection.from_json(told) for name, told in answer["programs"].items()}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the child process says: {"programs": {name: an Inspection's JSON}}, or {"error": one line} where the
    request is at fault."""
    try:
        config = overrides.from_dict(request["config"])
        model = architectures.resolve_config(config)
        device = detect.named(request["device"])
        target = require_compiler(device.name, device.compile_target)
        sampling = Sampling(**request["sampling"]) if request["sampling"] else None
        if sampling is None and config.attention.implementation == "cudnn":
            raise UserError(
                "config.attention.implementation is 'cudnn', which JAX compiles for devices that are there alone; "
                "leave out --compile, or set it to auto"
            )
        made = programs_of(config, model, device.platform, abstract_mesh(config), sampling)
        told = {name: inspection_for(program, target, request["count"]).to_json() for name, program in made.items()}
    except UserError as error:
        return {"error": str(error)}
    return {"programs": told}


def main() -> None:
    # Compilers write to standard output as they please; the answer is to be alone on it.
    out = os.dup(1)
    os.dup2(2, 1)
    told = json.dumps(answer(json.load(sys.stdin)))
    with os.fdopen(out, "w") as stream:
        stream.write(told + "\n")


if __name__ == "__main__":
    main()
