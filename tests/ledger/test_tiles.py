"""Tiled sizes of arrays on a TPU, against the buffers that its compiler allocates."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.ledger.formula.exact import tpu_tiles
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.rows import PERSISTENT

# (shape, bytes per element) -> size of the buffer, in buffer assignments of libtpu of JAX 0.10.2 for a v5e.
BUFFERS = {
    ((), 4): 512,
    ((2,), 4): 512,
    ((144,), 2): 512,
    ((144,), 4): 1024,
    ((576,), 2): 2048,
    ((576,), 4): 4096,
    ((3584,), 4): 16384,
    ((1, 1024), 4): 4096,
    ((2, 1024), 4): 8192,
    ((28, 256), 4): 32768,
    ((28, 14), 4): 8192,  # the 28 along the lanes
    ((28, 32), 4): 16384,
    ((13, 144), 2): 8192,
    ((13, 144), 4): 16384,
    ((12565, 80), 4): 4055040,
    ((49152, 576), 2): 56623104,
    ((50257, 768), 4): 154411008,
    ((28, 28, 1), 4): 14336,
    ((36, 5, 4), 4): 10240,
    ((24, 2, 64), 4): 24576,
    ((24, 14, 64), 4): 172032,
    ((28, 14, 18944), 4): 33947648,
    ((30, 9, 64, 576), 4): 44236800,
    ((30, 9, 64, 576), 2): 22118400,
    ((13, 144, 4, 256), 2): 3833856,
    ((16, 128, 32, 64), 4): 16777216,  # 64 elements in the last dimension, and no padding
    ((36, 80, 5, 64), 4): 5898240,
    ((28, 28, 128, 14), 4): 6422528,
}


@pytest.mark.parametrize(("shape", "itemsize"), BUFFERS)
def test_padded_bytes_are_the_compilers(shape, itemsize):
    assert tpu_tiles.padded_bytes(shape, itemsize) == BUFFERS[shape, itemsize]


def test_a_row_of_packed_numbers_takes_as_much_as_two():
    assert tpu_tiles.padded_bytes((1, 256), 2) == tpu_tiles.padded_bytes((2, 256), 2) == 1024
    assert tpu_tiles.padded_bytes((1, 256), 4) == 1024


@given(st.lists(st.integers(1, 300), min_size=0, max_size=5), st.sampled_from((1, 2, 4)))
def test_padding_is_bounded_and_does_not_depend_on_the_order_of_dimensions(shape, itemsize):
    size, plain = tpu_tiles.padded_bytes(tuple(shape), itemsize), math.prod(shape) * itemsize
    assert size >= plain
    assert size % tpu_tiles.ALIGNMENT == 0
    assert size == tpu_tiles.padded_bytes(tuple(reversed(shape)), itemsize)
    full = (*shape, tpu_tiles.SUBLANES, tpu_tiles.LANES)
    assert tpu_tiles.padding(full, itemsize) == 0


def config_of(
    name: str, mesh: tuple[int, int, int, int], optimizer: str, policy: str, batch: tuple[int, int]
) -> Config:
    """Returns the configuration of a run.

    Args:
      mesh: sizes of replica, data and tensor, and the ZeRO stage.
      batch: sequences per step, and tokens of each.
    """
    config = Config()
    config.model.name, config.optimizer.name, config.precision.policy = name, optimizer, policy
    config.mesh.replica, config.mesh.data, config.mesh.tensor, config.mesh.zero = mesh
    config.train.batch_size, config.data.sequence_length = batch
    return config


# A run -> the compiler's size of its train step's arguments, bytes on one device.
ARGUMENTS = [
    (("llama3.2-1b", (1, 16, 1, 3), "momentum", "bf16", (1024, 512)), 618563584),
    (("qwen2.5-7b", (1, 256, 1, 3), "sgd", "bf16", (1024, 512)), 131739136),
    (("gemma2-9b", (1, 32, 8, 3), "adamw", "bf16", (128, 4096)), 433802240),
    (("gpt2", (1, 8, 1, 2), "adamw", "fp32", (1024, 512)), 631279104),
    (("qwen2.5-0.5b", (1, 1, 1, 0), "lion", "bf16", (8, 4096)), 3953141248),
    (("smollm2-1.7b", (1, 4, 2, 1), "lion", "bf16_pure", (16, 512)), 2567257600),
    (("gpt2-large", (1, 16, 4, 1), "sgd", "bf16", (128, 512)), 55513088),
    (("qwen3-0.6b", (2, 4, 2, 1), "adamw", "bf16", (64, 4096)), 894931456),
]


def with_batch(ledger) -> int:
    return ledger.persistent_bytes + next(row.bytes_per_device for row in ledger.rows if row.kind == "batch")


@pytest.mark.parametrize(("run", "arguments"), ARGUMENTS, ids=[run[0] for run, _ in ARGUMENTS])
def test_arguments_of_a_train_step_are_exact(run, arguments):
    config = config_of(*run)
    model = architectures.resolve_config(config)
    ledger = training(model, config, config.precision.policy, "tpu")
    assert with_batch(ledger) == arguments
    plain = training(model, config, config.precision.policy, "gpu")
    assert with_batch(plain) < arguments  # without tiles it is smaller
    assert not [row for row in plain.rows if row.kind == tpu_tiles.PADDING]
    assert ledger.kind_bytes(tpu_tiles.PADDING) == ledger.persistent_bytes - plain.persistent_bytes


def test_moments_of_adafactor_are_tiled_and_its_placeholders_take_a_buffer_each():
    """Placeholders are no arguments, since the program makes them anew: 18 of this model's, 512 B each."""
    run = ("smollm2-135m", (1, 1, 1, 0), "adafactor", "bf16_pure", (2, 1024))
    config = config_of(*run)
    model = architectures.resolve_config(config)
    arguments = 394153472
    assert with_batch(training(model, config, "bf16_pure", "tpu")) == arguments + 18 * 512


def test_state_in_host_memory_is_not_tiled():
    config = config_of("qwen2.5-0.5b", (1, 1, 1, 0), "adamw", "bf16", (8, 4096))
    config.optimizer.offload = "all"
    model = architectures.resolve_config(config)
    rows = [row for row in training(model, config, "bf16", "tpu").rows if row.kind == tpu_tiles.PADDING]
    assert [(row.phase, row.bytes_per_device) for row in rows] == [(PERSISTENT, 508 + 504 + 508)]  # step, key, counter


def test_an_odd_batch_is_tiled():
    config = config_of("gpt2", (1, 1, 1, 0), "sgd", "bf16", (3, 1000))
    config = dataclasses.replace(config)
    model = architectures.resolve_config(config)
    ledger = training(model, config, "bf16", "tpu")
    padding = {row.bytes_per_device for row in ledger.rows if row.name == "tile padding of the batch"}
    assert padding == {5 * (4 * 1024 - 3 * 1000) * 4}
