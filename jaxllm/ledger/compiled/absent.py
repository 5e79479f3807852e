"""Ahead-of-time compilation of a run's programs for absent devices, in a child process.

The compilers of the extras `cuda12` and `tpu` need no device, but they search for one when JAX starts, which is slow
and prints messages. They therefore run in a child process with JAX_PLATFORMS=cpu:

    python -m jaxllm.ledger.compiled.absent    JSON request on standard input, JSON response on standard output
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
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import detect
from jaxllm.hardware.compile_targets import Target
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.compiled.inspection import Inspection, SamplingSpec
from jaxllm.parallel import mesh
from jaxllm.programs import Program

# Modules that contain each platform's compiler; for CUDA, any version suffices.
_COMPILERS = {"cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "tpu": ("libtpu",)}
# Environment variables of the child process.
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",  # useless without a TPU, and slow without a network
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the lock guards a device, and none is attached
}


def require_compiler(device: str, target: Target | None) -> Target:
    """Returns the compile target of a device after checking that its compiler is installed.

    Raises:
      UserError: The device has no compile target, or the extra with its compiler is not installed.
    """
    if target is None:
        raise UserError(f"{device} is not a device that programs can be compiled for while it is absent; see --device")
    if not any(_is_installed(module) for module in _COMPILERS[target.platform]):
        raise UserError(
            f"compiling for {device} needs its compiler, which is not installed: pip install 'jaxllm[{target.extra}]'"
        )
    return target


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def inspect_program(program: Program, target: Target, count: int) -> Inspection:
    """Compiles a program for absent devices and inspects it; requirements on its inputs are those of `compile_for`."""
    if target.platform != "tpu":
        return inspection.inspect(functools.partial(compile_for, program, target, count))
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_module_re": ".*"}
        return inspection.inspect(
            functools.partial(compile_for, program, target, count, options),
            lambda executable: inspection.figures(executable) | inspection.tpu_figures(pathlib.Path(folder)),
        )


def compile_for(
    program: Program, target: Target, count: int, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a program for `count` absent devices.

    The inputs are sharded over an `AbstractMesh` of `count` devices, or have no sharding and `count` is 1. The mesh is
    abstract because the devices of a CUDA topology have no memory kinds: on a mesh of them, JAX 0.10.2 drops the host
    memory kind of offloaded arrays, and XLA counts those arrays as device memory.

    Args:
      program: Program to compile.
      target: Kind of device to compile for.
      count: Number of devices.
      options: XLA compiler options.
    """
    # Without a sharding, JAX would place the inputs on the CPU of this process.
    one_device = NamedSharding(AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,)), PartitionSpec())
    inputs = jax.tree.map(lambda x: x if x.sharding is not None else x.update(sharding=one_device), program.inputs)
    devices: Any = topologies.get_topology_desc(**target.topology(count)).devices
    lowered = program.jitted.trace(*inputs).lower(  # type: ignore[attr-defined]
        lowering_platforms=(target.platform,)
    )
    # JAX compiles for the given devices but with the default backend's compiler, so set the backend too.
    lowered._lowering.compile_args["backend"] = devices[0].client
    return lowered.compile(options, device_assignment=tuple(devices[:count]))


def abstract_mesh(config: Config) -> AbstractMesh:
    """Returns the mesh of `mesh.make_mesh` as an AbstractMesh, without devices."""
    # Auto is the default of `Mesh`, but JAX 0.12 gives an AbstractMesh explicit axes by default.
    types = (AxisType.Auto,) * len(mesh.AXES)
    return AbstractMesh(tuple(mesh.axis_sizes(config.mesh).values()), mesh.AXES, axis_types=types)


def inspect(config: Config, name: str, count: int, sampling: SamplingSpec | None = None) -> dict[str, Inspection]:
    """Compiles a task's programs for absent devices, in a child process, and returns one Inspection per program.

    Args:
      config: Configuration of the run.
      name: Device name, as accepted by `hardware.detect.by_name`.
      count: Number of devices.
      sampling: Sizes of a sampling run; None for training.
    Raises:
      UserError: The device or device count is not supported, config.mesh needs another count, or the compiler is not
        installed.
      RunError: Compilation failed.
    """
    device = detect.by_name(name)
    if sampling is None:
        mesh.require_count(config.mesh, count)
    assert sampling is None or sampling.mesh.count == count, (sampling, count)
    require_compiler(device.name, device.compile_target).topology(count)
    request = {"config": overrides.to_dict(config), "device": name, "count": count}
    request["sampling"] = sampling and dataclasses.asdict(sampling)
    child = subprocess.run(
        [sys.executable, "-m", "jaxllm.ledger.compiled.absent"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | QUIET,
        check=False,
    )
    try:
        response = json.loads(child.stdout)
    except ValueError:
        last = [line for line in child.stderr.splitlines() if line.strip()][-1:] or ["no output"]
        raise RunError(f"compiling for {count} × {device.name} failed (exit {child.returncode}): {last[0]}") from None
    if "error" in response:
        raise UserError(response["error"])
    return {name: Inspection.from_json(value) for name, value in response["programs"].items()}


def handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles the programs of a request, in the child process.

    Returns:
      {"programs": {name: JSON of its Inspection}}, or {"error": one line} if the request is invalid.
    """
    try:
        config = overrides.from_dict(request["config"])
        model = architectures.resolve_config(config)
        device = detect.by_name(request["device"])
        target = require_compiler(device.name, device.compile_target)
        sampling = None
        if request["sampling"]:
            sizes = InferenceMesh(**request["sampling"]["mesh"])
            sampling = SamplingSpec(**request["sampling"] | {"mesh": sizes})
            config = dataclasses.replace(config, mesh=sizes.config)
        if sampling is None and config.attention.implementation == "cudnn":
            raise UserError(
                "config.attention.implementation is 'cudnn', which JAX compiles for attached devices only; "
                "leave out --compile, or set it to auto"
            )
        programs = inspection.task_programs(config, model, device.platform, abstract_mesh(config), sampling)
        count = request["count"]
        return {"programs": {name: inspect_program(p, target, count).to_json() for name, p in programs.items()}}
    except UserError as error:
        return {"error": str(error)}


def main() -> None:
    # Compilers may write to standard output. Send that to standard error, so that it has the response only.
    out = os.dup(1)
    os.dup2(2, 1)
    response = json.dumps(handle_request(json.load(sys.stdin)))
    with os.fdopen(out, "w") as stream:
        stream.write(response + "\n")


if __name__ == "__main__":
    main()
