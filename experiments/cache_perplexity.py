"""Claim: keys and values stored in int8 change a model's perplexity by less than 1 %.

    python experiments/cache_perplexity.py [--model FILE.gguf]

SmolLM2-135M-Instruct reads `held_out.txt` through its cache, one chunk at a time: every token attends to keys and
values as stored in the cache, including those of its own chunk. All else is float32. Prints the claim, prediction,
measurement and verdict, and writes them to `results/cache_perplexity.json`.
"""

import argparse
import functools
import json
import math
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_vs_llamacpp
from decode_drift import machine
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.decode import cache as cache_lib
from jaxllm.decode.cache import KVCache
from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.model import transformer

RESULT = pathlib.Path(__file__).parent / "results" / "cache_perplexity.json"
CHUNK = 128
CACHES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}
PREDICTED = 0.01  # relative change of the perplexity


def chunk_losses(
    params: Any,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    model: Architecture,
) -> tuple[Float[Array, "B T"], KVCache]:
    """Returns the loss of each target in nats, 0 for padding, and the cache with the tokens appended."""
    positions = jnp.where(valid, cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None, :], 0)
    how: dict[str, Any] = {"valid": valid, "cache": cache.kv, "lengths": cache.lengths, "capacity": cache.capacity}
    hidden, kv, _ = transformer.forward(params, tokens, positions, model, **how)
    losses = -jax.nn.log_softmax(transformer.logits(hidden, params, model))
    losses = jnp.take_along_axis(losses, targets[..., None], axis=-1)[..., 0]
    return losses * valid, KVCache(kv, cache.lengths + valid.sum(1, dtype=jnp.int32), cache.capacity)


def perplexity(model: Architecture, params: Any, ids: np.ndarray, dtype: Any, chunk: int) -> float:
    """Returns exp of the mean loss of every id after the first, computed through a cache in `dtype`."""
    run = jax.jit(functools.partial(chunk_losses, model=model), donate_argnums=1)
    count = len(ids) - 1
    capacity = math.ceil(count / chunk) * chunk
    cache, total = cache_lib.create(model, 1, capacity, dtype), 0.0
    for begin in range(0, count, chunk):
        tokens, targets = np.zeros((1, chunk), np.int32), np.zeros((1, chunk), np.int32)
        size = min(chunk, count - begin)
        tokens[0, :size], targets[0, :size] = ids[begin : begin + size], ids[begin + 1 : begin + size + 1]
        losses, cache = run(params, cache, tokens, targets, np.arange(chunk)[None] < size)
        total += float(np.asarray(losses, np.float64).sum())
    return math.exp(total / count)


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
    params = opened.load(jnp.float32)
    print((__doc__ or "").split("\n\n")[0])
    print(f"\nprediction: int8 within {PREDICTED:.0%} of float32\n")
    found = {}
    for name, dtype in CACHES.items():
        found[name] = round(perplexity(opened.model, params, ids, dtype, CHUNK), 4)
        print(f"perplexity of {len(ids)} tokens, cache in {name}: {found[name]:.4f}", flush=True)
    holds = abs(found["int8"] / found["float32"] - 1) < PREDICTED
    print(f"\n{'holds' if holds else 'FAILS'}: int8 within {PREDICTED:.0%} of float32")
    RESULT.write_text(
        json.dumps(
            {"machine": machine(), "tokens": len(ids), "chunk": CHUNK, "perplexity": found, "verdict": holds}, indent=1
        )
        + "\n"
    )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
