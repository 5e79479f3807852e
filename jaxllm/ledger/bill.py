"""Builds the bill of a run on a device: closed-form memory and compute, with the device's capacity."""

import dataclasses

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Architecture, Config
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import inference_memory, roofline, training_memory
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.formats import AUTO as AUTO
from jaxllm.ledger.formula.roofline import Roofline
from jaxllm.ledger.rows import Ledger, Unknown
from jaxllm.step.precision import policy_for


def title(config: Config) -> str:
    """Returns the model's name, marked "(modified)" if the configuration overrides fields of a registered model."""
    changed = any(value is not None for name, value in vars(config.model).items() if name != "name")
    changed = changed and config.model.name in ARCHITECTURES  # an imported model sets all fields
    return f"{config.model.name} (modified)" if changed else config.model.name


def training(config: Config, model: Architecture, device: Device) -> Ledger:
    """Returns the ledger of a training run on a device, attached or absent, with the compute of one step."""
    policy = policy_for(config.precision.policy, device.platform)
    run = run_lib.make(model, config, policy.name, device.platform)
    billed = _on(device, training_memory.bill(run), roofline.train_step(run, device))
    return dataclasses.replace(billed, model=title(config))


def compute_format(platform: str) -> str:
    """Returns the format in which programs store and compute with weights and cache on a platform."""
    return policy_for("auto", platform).name


def sampling(
    name: str,
    model: Architecture,
    device: Device,
    batch: int,
    capacity: int,
    chunk: int,
    weights: str = AUTO,
    cache: str = AUTO,
    use_cache: bool = True,
    mesh: InferenceMesh = ONE_DEVICE,
) -> Ledger:
    """Returns the ledger of decoding, for one device of a mesh, with the compute of one token.

    Args:
      name: Name of the model, for the title.
      model: Architecture of the model.
      device: Device to bill, attached or absent.
      batch: Number of sequences decoded together, over all devices.
      capacity: Maximum tokens per sequence, prompt included.
      chunk: Prompt tokens processed per prefill call.
      weights, cache: Format names of `ledger.formula.exact.formats`; auto is the platform's compute format.
      use_cache: False runs a whole forward pass for every token.
      mesh: Number of devices along each mesh axis.

    Raises:
      UserError: The format is not supported, or the model cannot be sharded over the mesh.
    """
    plain, dtype = compute_format(device.platform), policy_for("auto", device.platform).compute_dtype.name
    weights, cache = (plain if name == AUTO else name for name in (weights, cache))
    ledger = inference_memory.inference(
        model,
        batch,
        capacity,
        chunk,
        weights,
        cache,
        name,
        device.platform,
        use_cache=use_cache,
        vector_memory=device.vector_memory,
        mesh=mesh,
    )
    program = roofline.decode_token if use_cache else roofline.prefill
    least = program(model, batch, capacity, weights, cache, device, dtype, mesh)
    return _on(device, ledger, least)


def _on(device: Device, ledger: Ledger, least: Roofline) -> Ledger:
    capacity = device.memory_of_each(ledger.count)
    return dataclasses.replace(
        ledger,
        device=device.name,
        capacity_bytes=Unknown(f"{device.name}: {device.source}") if capacity is None else capacity,
        compute=least,
    )
