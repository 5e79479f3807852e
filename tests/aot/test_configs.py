"""Every shipped configuration compiles for its hardware and fits there by all available columns."""

import math
import pathlib
import re
import runpy

import absent_programs
import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import format_bytes
from jaxllm.parallel import mesh

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
TARGETS = [
    ("gpt2_124m", "h100", {}),
    ("llama3_8b", "h100", {}),
    ("llama3_70b", "h100", {}),
    ("llama3_70b", "v5p", {}),
    ("gpt3_175b", "h100", {}),
    ("gpt3_175b", "h100", {"mesh.data": 512, "mesh.tensor": 2, "train.accumulate": 1}),
    ("mixtral_8x7b", "h100", {}),
    ("qwen3_30b_a3b", "h100", {}),
]


def load(name: str, overrides: dict[str, int]) -> Config:
    config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    for path, value in overrides.items():
        section, field = path.split(".")
        setattr(getattr(config, section), field, value)
    return config


def test_every_configuration_has_a_target():
    named = {name for name, _, _ in TARGETS} | {"quickstart", "finetune_smollm2"}  # for a CPU
    assert named == {path.stem for path in CONFIGS.glob("*.py")}


@pytest.mark.parametrize(("name", "device", "overrides"), TARGETS)
def test_it_compiles_and_fits(name, device, overrides):
    config = load(name, overrides)
    target = detect.by_name(device)
    ledger = training_memory.training(
        architectures.resolve_config(config), config, config.precision.policy, target.platform
    )
    found = absent_programs.train_step(config, device)
    capacity, peak = target.memory_bytes, found.figures["peak"]
    figures = (
        f"{name}: formula {format_bytes(ledger.peak_bytes)}, XLA {format_bytes(peak)}, has {format_bytes(capacity)}"
    )
    assert ledger.peak_bytes < capacity, figures
    assert peak < 0.95 * capacity, figures
    batch = 5 * 4 * config.train.batch_size * config.data.sequence_length // (config.mesh.data * config.mesh.replica)
    # A TPU may pad arrays of a few elements.
    assert found.figures["arguments"] == pytest.approx(
        ledger.persistent_bytes + batch, rel=1e-3 if device == "v5p" else 0
    )
    assert ledger.count == math.prod(mesh.axis_sizes(config.mesh).values())
    # The bill in the docstring states the formula's peak, in the unit and digits of the ledger.
    bill = (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    if not overrides and device == "h100":
        (stated,) = re.findall(r"([\d.]+ GiB) at its peak", bill)
        assert stated == format_bytes(ledger.peak_bytes), figures
