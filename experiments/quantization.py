"""Claim: int8 changes perplexity by less than 0.5 %, and GPTQ and AWQ lose clearly less than rounding in int4.

    python experiments/quantization.py [--model FILE.gguf]

SmolLM2-135M-Instruct reads `held_out.txt` with its matrices in several formats; the calibration text is this project's
documentation. All else is float32. The released file has groups of 32 4-bit weights, and so the formats here have
groups of 64 or whole channels: groups of 32 would fall on the same grid. Prints the claim, measurements and verdicts,
and writes them to `results/quantization.json`.
"""

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_vs_llamacpp
from cache_perplexity import CHUNK, perplexity
from decode_drift import machine

from jaxllm.config import Architecture
from jaxllm.decode import weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.quantize import calibrate
from jaxllm.quantize.formats import QuantFormat

HERE = pathlib.Path(__file__).parent
RESULT = HERE / "results" / "quantization.json"
SEQUENCES, LENGTH = 32, 256  # of calibration text
INT8_WITHIN = 0.005  # relative change of the perplexity
GAIN = 0.75  # GPTQ and AWQ: change of the log of the perplexity, relative to that of rounding
# Name, format and method.
CELLS = (
    ("int8, channel", QuantFormat(8, 0), "nearest"),
    ("int4, groups of 64", QuantFormat(4, 64), "nearest"),
    ("int4, groups of 64, GPTQ", QuantFormat(4, 64), "gptq"),
    ("int4, groups of 64, AWQ", QuantFormat(4, 64), "awq"),
    ("int4 asymmetric, groups of 64", QuantFormat(4, 64, symmetric=False), "nearest"),
    ("int4 asymmetric, groups of 64, GPTQ", QuantFormat(4, 64, symmetric=False), "gptq"),
    ("int4 asymmetric, groups of 64, AWQ", QuantFormat(4, 64, symmetric=False), "awq"),
)


def calibration_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Returns [SEQUENCES, LENGTH] tokens of this project's documentation."""
    pages = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md")), HERE / "LOG.md"]
    ids = tokenizer.encode("\n".join(page.read_text("utf-8") for page in pages))
    assert len(ids) >= SEQUENCES * LENGTH, len(ids)
    return np.asarray(ids[: SEQUENCES * LENGTH], np.int32).reshape(SEQUENCES, LENGTH)


def matrix_bytes(params: Any) -> int:
    """Returns the bytes of the matrices of all layers, with their scales."""
    return sum(
        x.nbytes
        for layer in params["tail"]
        for group, names in (("attn", ("qkv", "out")), ("mlp", ("gate_up", "up", "down")))
        for name in names
        if name in layer[group]
        for x in jax.tree.leaves(layer[group][name])
    )


def measure(model: Architecture, params: Any, ids: np.ndarray, calibration: np.ndarray) -> list[dict[str, Any]]:
    """Returns bytes of the matrices and perplexity of every format, float32 first."""
    declared = weights.model_in(model, WeightLayout.PER_LAYER)
    exact = weights.arrange(params, model, WeightLayout.PER_LAYER)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), exact)
    found = []

    def add(name: str, tree: Any, size: int, seconds: float = 0.0) -> None:
        score = perplexity(declared, tree, ids, jnp.float32, CHUNK)
        found.append(
            {"format": name, "matrix_bytes": size, "perplexity": round(score, 4), "seconds": round(seconds, 1)}
        )
        print(f"{name:<36} {size / 1e6:7.1f} MB   perplexity {score:.4f}", flush=True)

    add("float32", exact, matrix_bytes(exact))
    add("bfloat16 weights", rounded, matrix_bytes(exact) // 2)
    for name, fmt, method in CELLS:
        began = time.perf_counter()
        tree = calibrate.quantize(exact, model, calibration, fmt, method)
        add(name, tree, matrix_bytes(tree), time.perf_counter() - began)
    return found


def verdicts(found: list[dict[str, Any]]) -> dict[str, bool]:
    """Returns whether each part of the claim holds."""
    change = {each["format"]: np.log(each["perplexity"] / found[0]["perplexity"]) for each in found}
    return {
        "int8 within 0.5 %": abs(np.expm1(change["int8, channel"])) < INT8_WITHIN,
        **{
            f"{name}, {method} loses less than {GAIN} of rounding": bool(
                change[f"{name}, {method}"] < GAIN * change[name]
            )
            for name in ("int4, groups of 64", "int4 asymmetric, groups of 64")
            for method in ("GPTQ", "AWQ")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    arguments = parser.parse_args()
    try:
        opened = gguf.open_file(arguments.model or smollm2_vs_llamacpp.fetch())
    except UserError as error:
        sys.exit(f"error: {error}")
    assert opened.text.tokenizer is not None
    ids = opened.text.tokenizer.encode(smollm2_vs_llamacpp.HELD_OUT.read_text("utf-8"))
    print((__doc__ or "").split("\n\n")[0], "\n")
    found = measure(opened.model, opened.load(jnp.float32), ids, calibration_tokens(opened.text.tokenizer))
    checks = verdicts(found)
    for name, holds in checks.items():
        print(f"{'holds' if holds else 'FAILS'}: {name}")
    result = {"machine": machine(), "tokens": len(ids), "calibration": [SEQUENCES, LENGTH], "cells": found}
    RESULT.write_text(json.dumps(result | {"verdicts": {k: bool(v) for k, v in checks.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
