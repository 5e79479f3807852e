"""Claim: a decoded token reads the weights and the cache once, and decoding needs no copy of them.

    python experiments/decode_bytes.py          # compiles for an absent H100; needs the extra cuda12

Compiles the decode program of published models for one or several H100 and counts the bytes that one token of each
sequence moves in the memory of a device (`ledger.compiled.traffic`), relative to the weights that it needs and the
cache. Writes `results/decode_bytes.json`.
"""

import json
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jaxllm import architectures, programs
from jaxllm.config import Config
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.decode import weights
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, hlo
from jaxllm.ledger.compiled.traffic import traffic
from jaxllm.ledger.formula import flops

DEVICE, CONTEXT, STEPS = "h100", 4096, 8
# Model, sequences, format of the cache, and devices.
CELLS = (
    ("gpt2", 1, "bf16", ONE_DEVICE),
    ("smollm2-135m", 1, "bf16", ONE_DEVICE),
    ("llama3.2-1b", 8, "bf16", ONE_DEVICE),
    ("llama3-8b", 1, "bf16", ONE_DEVICE),
    ("llama3-8b", 8, "bf16", ONE_DEVICE),
    ("llama3-8b", 8, "int8", ONE_DEVICE),
    ("gemma2-2b", 1, "bf16", ONE_DEVICE),
    ("gemma3-4b", 8, "int8", ONE_DEVICE),
    ("mixtral-8x7b", 1, "bf16", ONE_DEVICE),
    ("qwen3-30b-a3b", 1, "bf16", ONE_DEVICE),
    ("llama3-70b", 1, "bf16", ONE_DEVICE),
    ("llama3-70b", 1, "bf16", InferenceMesh(tensor=2)),
    ("llama3-70b", 8, "bf16", InferenceMesh(tensor=4)),
    ("llama3-70b", 8, "int8", InferenceMesh(tensor=8)),
)


def measure(name: str, batch: int, cache: str, sizes: InferenceMesh) -> dict[str, Any]:
    """Returns the bytes that one device moves for a token of each sequence, temporaries, and the compile time."""
    model, device = architectures.ARCHITECTURES[name], detect.by_name(DEVICE)
    dtype = jnp.int8 if cache == "int8" else jnp.bfloat16
    context = min(CONTEXT, model.context_length)
    layout = weights.layout_for(device.platform)
    config = Config()
    config.mesh = sizes.config
    mesh = absent.abstract_mesh(config) if sizes.count > 1 else None
    program = programs.decode(model, batch, STEPS, context, jnp.bfloat16, dtype, layout, mesh)
    began = time.perf_counter()
    executable = absent.compile_for(program, absent.require_compiler(device.name, device.compile_target), sizes.count)
    seconds = time.perf_counter() - began
    moved = traffic(hlo.parse(executable.as_text()), per_iteration=True)
    needed = flops.decode_token(model, batch, context, "bf16", cache, sizes).bytes
    return {
        "model": name,
        "batch": batch,
        "context": context,
        "cache": cache,
        "mesh": str(sizes),
        "weights_and_cache_bytes": needed,
        "moved_bytes": moved.total,
        "ratio": round(moved.total / needed, 4),
        "temporary_bytes": executable.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(seconds, 1),
    }


def main() -> None:
    found = []
    for cell in CELLS:
        found.append(measure(*cell))
        print(json.dumps(found[-1]), flush=True)
    result = {"device": f"{DEVICE}, absent", "jax": jax.__version__, "cells": found}
    path = pathlib.Path(__file__).parent / "results" / "decode_bytes.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
