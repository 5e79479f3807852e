"""Claim: a decoded token reads the weights and the cache once, and decoding needs no copy of them.

    python experiments/decode_bytes.py          # compiles for an absent H100; needs the extra cuda12

Compiles the decode program of published models for an H100 and counts the bytes that one token of each sequence moves
in device memory (`ledger.compiled.traffic`), relative to the weights that it needs and the cache. Writes
`results/decode_bytes.json`.
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
from jaxllm.decode import weights
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, hlo
from jaxllm.ledger.compiled.traffic import traffic
from jaxllm.ledger.formula import flops

DEVICE, CONTEXT, STEPS = "h100", 4096, 8
# Model, sequences, and format of the cache.
CELLS = (
    ("gpt2", 1, "bf16"),
    ("smollm2-135m", 1, "bf16"),
    ("llama3.2-1b", 8, "bf16"),
    ("llama3-8b", 1, "bf16"),
    ("llama3-8b", 8, "bf16"),
    ("llama3-8b", 8, "int8"),
    ("gemma2-2b", 1, "bf16"),
    ("gemma3-4b", 8, "int8"),
    ("mixtral-8x7b", 1, "bf16"),
    ("qwen3-30b-a3b", 1, "bf16"),
    ("llama3-70b", 1, "bf16"),
)


def measure(name: str, batch: int, cache: str) -> dict[str, Any]:
    """Returns the bytes of one decoded token per sequence, temporaries, and the compile time of a cell."""
    model, device = architectures.ARCHITECTURES[name], detect.by_name(DEVICE)
    dtype = jnp.int8 if cache == "int8" else jnp.bfloat16
    context = min(CONTEXT, model.context_length)
    layout = weights.layout_for(device.platform)
    program = programs.decode(model, batch, STEPS, context, jnp.bfloat16, dtype, layout)
    began = time.perf_counter()
    executable = absent.compile_for(program, absent.require_compiler(device.name, device.compile_target), 1)
    seconds = time.perf_counter() - began
    moved = traffic(hlo.parse(executable.as_text()), per_iteration=True)
    needed = flops.decode_token(model, batch, context, "bf16", cache).bytes
    return {
        "model": name,
        "batch": batch,
        "context": context,
        "cache": cache,
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
