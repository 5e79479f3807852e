"""Inference settings on which the ledger's peaks are compared with XLA's: published models at their full sizes.

They are compiled and never run, so a model's size costs nothing. Each setting has two programs, prefill and decode.
"""

from collections.abc import Iterator

import jax

from jaxllm import architectures, programs
from jaxllm.config import Config
from jaxllm.decode import weights
from jaxllm.hardware import detect
from jaxllm.ledger.compiled.inspection import SamplingSpec
from jaxllm.programs import Program
from jaxllm.step.precision import policy_for

STEPS = 8  # maximum tokens per decode call
# Model, sequences, tokens of context, prompt tokens per sequence and prefill call.
SHAPES = (
    ("gpt2", 1, 1024, 128),
    ("gpt2", 8, 1024, 128),
    ("gpt2-medium", 4, 512, 512),
    ("gpt2-xl", 16, 1024, 32),
    ("smollm2-135m", 1, 2048, 128),
    ("smollm2-360m", 32, 2048, 128),
    ("smollm2-1.7b", 4, 8192, 256),
    ("llama3.2-1b", 1, 2048, 128),
    ("llama3.2-1b", 16, 4096, 128),
    ("llama3.2-1b", 4, 16384, 1024),
    ("llama3.2-3b", 8, 8192, 128),
    ("qwen2.5-0.5b", 2, 4096, 512),
    ("qwen2.5-1.5b", 64, 1024, 64),
    ("qwen2.5-3b", 1, 32768, 128),
    ("qwen3-0.6b", 8, 4096, 128),
    ("qwen3-4b", 1, 8192, 2048),
    ("gemma2-2b", 1, 8192, 128),
    ("gemma2-2b", 4, 2048, 128),
    ("gemma3-1b", 1, 4096, 128),
    ("gemma3-1b", 16, 8192, 256),
    ("gemma3-4b", 2, 16384, 128),
    ("llama3-8b", 1, 8192, 128),
    ("llama3-8b", 8, 4096, 512),
    ("llama3-8b", 32, 2048, 128),
    ("mistral-7b", 1, 16384, 128),
    ("mistral-7b", 8, 2048, 256),
    ("qwen3-8b", 4, 16384, 128),
    ("gemma2-9b", 2, 8192, 128),
    ("mixtral-8x7b", 1, 4096, 128),
    ("mixtral-8x7b", 8, 2048, 256),
    ("qwen3-30b-a3b", 1, 4096, 128),
    ("qwen3-30b-a3b", 8, 2048, 128),
)
# Settings in the non-default dtype: bfloat16 on a CPU, float32 elsewhere.
OTHER_DTYPE = (
    ("gpt2", 4, 1024, 128),
    ("smollm2-360m", 4, 2048, 256),
    ("llama3.2-1b", 8, 2048, 128),
    ("qwen2.5-0.5b", 16, 1024, 64),
    ("gemma3-1b", 2, 4096, 128),
    ("gemma2-2b", 2, 4096, 256),
    ("llama3-8b", 2, 4096, 128),
    ("qwen3-30b-a3b", 2, 2048, 64),
)
# A TPU's compiler refuses programs that need more memory than the device has, and it is slow.
TPU_MODELS = ("gpt2", "smollm2-360m", "llama3.2-1b", "qwen2.5-1.5b", "qwen3-0.6b", "gemma3-1b", "gemma2-2b")
DEVICES = {"cpu": "cpu", "h100": "gpu", "v5e": "tpu"}


def inference_cells(
    devices: tuple[str, ...] = ("cpu", "h100", "v5e"),
) -> Iterator[tuple[str, Config, SamplingSpec, str]]:
    """Yields (name, configuration, sampling, device); the configuration sets the model and the precision.

    Args:
      devices: "cpu" is this machine's CPU; the others are names known to `hardware.detect.by_name`.
    """
    for device in devices:
        auto = policy_for("auto", DEVICES[device]).name
        for shapes, policy in ((SHAPES, auto), (OTHER_DTYPE, "bf16" if auto == "fp32" else "fp32")):
            for model, batch, context, chunk in shapes:
                if device == "v5e" and model not in TPU_MODELS:
                    continue
                config = Config()
                config.model.name, config.precision.policy = model, policy
                name = f"{device} {model} {policy} batch {batch} context {context} chunk {chunk}"
                yield name, config, SamplingSpec(batch, context, chunk, STEPS), device


def programs_of_cell(config: Config, sampling: SamplingSpec, device: str) -> dict[str, Program]:
    """Returns the prefill and decode programs of a cell."""
    model = architectures.resolve_config(config)
    dtype = policy_for(config.precision.policy, DEVICES[device]).compute_dtype
    how = (sampling.context, dtype, dtype, weights.layout_for(DEVICES[device]))
    return {
        "prefill": programs.prefill(model, sampling.batch, sampling.chunk, *how),
        "decode": programs.decode(model, sampling.batch, sampling.steps, *how),
    }


def compile_cell(program: Program, device: str) -> jax.stages.Compiled:
    """Compiles a program for this machine's CPU, or for an absent device."""
    if device == "cpu":
        return program.compile()
    from jaxllm.ledger.compiled import absent  # needs the environment with the compilers for absent devices

    target = detect.by_name(device).compile_target
    assert target is not None
    return absent.compile_for(program, target, 1)
