"""The bill of a run on a device: the closed forms of memory and work together, with the device's capacity."""

import dataclasses

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Architecture, Config
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import communication, inference_memory, roofline, training_memory
from jaxllm.ledger.formula.exact import run as setting_lib
from jaxllm.ledger.formula.exact.formats import AUTO as AUTO
from jaxllm.ledger.formula.roofline import Roofline
from jaxllm.ledger.rows import Ledger, Unknown
from jaxllm.step.precision import policy_for


def title(config: Config) -> str:
    """The model's name; where the configuration changes its numbers, that it does."""
    changed = any(value is not None for name, value in vars(config.model).items() if name != "name")
    changed = changed and config.model.name in ARCHITECTURES  # an imported model is all numbers
    return f"{config.model.name} (modified)" if changed else config.model.name


def training(config: Config, model: Architecture, device: Device) -> Ledger:
    """The ledger of a training run on a device, attached or not, with its capacity and the work of one step.

    `compute` has beside it "sent_bytes": what one device sends to the others in a step, in rings.
    """
    policy = policy_for(config.precision.policy, device.platform)
    ledger = training_memory.training(model, config, policy.name, device.platform)
    setting = setting_lib.make(model, config, policy.name, device.platform)
    billed = _on(device, ledger, roofline.train_step(setting, device))
    sent = round(sum(transfer.ring_bytes for transfer in communication.train_step(model, config, policy.name)))
    return dataclasses.replace(billed, model=title(config), compute={**billed.compute, "sent_bytes": sent})


def plain_format(platform: str) -> str:
    """The format of weights and cache that programs compute with on a platform, and hold them in."""
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
) -> Ledger:
    """The ledger of decoding on a device, with the work of one token.

    Args:
      name: of the model, for the title.
      batch: sequences at a time.
      capacity: tokens of prompt and text a sequence may have.
      chunk: prompt tokens taken at a time.
      weights, cache: formats, by the names of `ledger.formats`; auto is what programs compute with.
      use_cache: False is a whole forward pass for every token.
    Raises:
      UserError: no such format.
    """
    plain, dtype = plain_format(device.platform), policy_for("auto", device.platform).compute.name
    weights, cache = (plain if name == AUTO else name for name in (weights, cache))
    how = (model, batch, capacity, chunk, weights, cache, name, device.platform)
    ledger = inference_memory.inference(*how, use_cache=use_cache, vector_memory=device.vector_memory)
    work = (capacity, weights, cache, device, dtype)
    least = roofline.decode_token(model, batch, *work) if use_cache else roofline.prefill(model, batch, *work)
    return _on(device, ledger, least)


def _on(device: Device, ledger: Ledger, least: Roofline) -> Ledger:
    capacity = device.memory_of_each(ledger.count)
    return dataclasses.replace(
        ledger,
        device=device.name,
        capacity_bytes=Unknown(f"{device.name}: {device.source}") if capacity is None else capacity,
        compute=least.to_json(),
    )
