"""Claim: greedy tokens in float32 do not depend on the batch size; in bfloat16 a row diverges only where the top
two logits are nearly equal.

    python experiments/decode_drift.py [--model FILE.gguf] [--tokens 32]

SmolLM2-135M-Instruct continues the same prompts alone and in batches of 2 to 16, with the programs of `jaxllm.sample`.
Prints the claim, prediction, measurement and verdict, and writes them to `results/decode_drift.json`. Runs on JAX's
default device; JAX_PLATFORMS=cpu selects the CPU.

A gap is the logit of the token chosen at batch size 1 minus the logit of the token chosen at another batch size, after
the same text: once from a plain forward pass in the dtype of the run, once in float32.
"""

import argparse
import dataclasses
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_vs_llamacpp

from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.pretrained import Pretrained
from jaxllm.model import transformer

RESULT = pathlib.Path(__file__).parent / "results" / "decode_drift.json"
SIZES = (1, 2, 4, 8, 16)
CHUNK = 32  # prompt tokens per prefill; every prompt is shorter
PREDICTED_GAP = 0.25  # the resolution of bfloat16 logits from 16 to 32 is about 0.125
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "To bake a loaf of bread you need",
    "Dear Sir or Madam,\n\nI am writing to",
)


@dataclasses.dataclass(frozen=True)
class Drift:
    """Row whose tokens differ from those of its prompt at batch size 1.

    Attributes:
      size: batch size.
      prompt: index of the prompt.
      position: index of the first differing token among the new ones; the shorter row's length if it is a prefix of
        the longer one.
      alone, together: the token at `position` at batch size 1 and in the batch; -1 if the row has ended.
    """

    size: int
    prompt: int
    position: int
    alone: int
    together: int


def first_difference(alone: Sequence[int], together: Sequence[int]) -> int | None:
    """Returns the first position at which two rows of tokens differ, or None if they are equal."""
    for position, (x, y) in enumerate(zip(alone, together, strict=False)):
        if x != y:
            return position
    return None if len(alone) == len(together) else min(len(alone), len(together))


def drifts(
    continued: Callable[[list[str]], list[list[int]]], prompts: Sequence[str], sizes: Sequence[int]
) -> tuple[list[list[int]], dict[int, int], list[Drift]]:
    """Runs every prompt in batches of every size and compares its tokens with those at batch size 1.

    Args:
      continued: maps the prompts of one batch to the new tokens of each.
      sizes: batch sizes; the first is 1. Prompts fill a batch in order and repeat if the batch is larger.

    Returns:
      (tokens of each prompt alone, number of rows run at each batch size, the rows that differ).
    """
    assert sizes[0] == 1, "the other sizes are compared with batch size 1"
    alone = [continued([prompt])[0] for prompt in prompts]
    rows, found = {}, []
    for size in sizes[1:]:
        count = -(-max(len(prompts), size) // size) * size
        order = [index % len(prompts) for index in range(count)]
        rows[size] = count
        for begin in range(0, count, size):
            batch = order[begin : begin + size]
            for prompt, tokens in zip(batch, continued([prompts[index] for index in batch]), strict=True):
                place = first_difference(alone[prompt], tokens)
                if place is not None:
                    pair = (tokens_at(alone[prompt], place), tokens_at(tokens, place))
                    found.append(Drift(size, prompt, place, *pair))
    return alone, rows, found


def tokens_at(row: Sequence[int], position: int) -> int:
    return row[position] if position < len(row) else -1


class Logits:
    """Plain forward pass over one text in one dtype, compiled once."""

    def __init__(self, opened: Pretrained, params: Any, capacity: int):
        self._params, self._capacity = params, capacity

        def run(params: Any, ids: jax.Array) -> jax.Array:
            hidden, _, _ = transformer.forward(params, ids[None], jnp.arange(capacity)[None], opened.model)
            return transformer.logits(hidden[0], params, opened.model)

        self._run = jax.jit(run)

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        """Returns the logits [T, V], float32, after each token."""
        padded = np.zeros(self._capacity, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(self._run(self._params, padded))[: len(ids)]


def measure(opened: Pretrained, dtype: Any, tokens: int, exact: Any) -> dict[str, Any]:
    """Measures one dtype: rows that differ, and the logit gaps at and around the differences.

    Args:
      dtype: dtype of the parameters and of the generator.
      tokens: new tokens per prompt.
      exact: float32 parameters.
    """
    assert opened.text.tokenizer is not None
    params = jax.tree.map(lambda x: x.astype(dtype), exact)
    capacity = CHUNK + tokens
    generator = Generator(
        opened.model, params, opened.text.tokenizer, dtype, capacity=capacity, chunk=CHUNK, steps=tokens
    )
    request = SampleRequest(max_new_tokens=tokens, sampling=SamplingOptions(temperature=0.0), ignore_eos=True)

    def continued(prompts: list[str]) -> list[list[int]]:
        print(f"  {jnp.dtype(dtype).name}, batch of {len(prompts)}", file=sys.stderr)
        return [result.tokens for result in generator.generate(prompts, request)[0]]

    alone, rows, found = drifts(continued, PROMPTS, SIZES)
    ids = [generator.encode(prompt).tolist() for prompt in PROMPTS]
    texts = [prompt + row for prompt, row in zip(ids, alone, strict=True)]
    after = {"in its dtype": Logits(opened, params, capacity)}
    if dtype != jnp.float32:
        after["in float32"] = Logits(opened, exact, capacity)
    logits = {name: [run(text) for text in texts] for name, run in after.items()}

    def gap(name: str, drift: Drift) -> float:
        there = logits[name][drift.prompt][len(ids[drift.prompt]) + drift.position - 1]
        return float(there[drift.alone] - there[drift.together])

    tops = [
        np.diff(np.sort(text[len(prompt) - 1 : -1], axis=-1)[:, -2:], axis=-1)[:, 0]
        for prompt, text in zip(ids, logits["in its dtype"], strict=True)
    ]
    margins = np.concatenate(tops)
    gaps = [{"gap " + name: round(gap(name, drift), 4) for name in after} for drift in found]
    widest = max((abs(row["gap in its dtype"]) for row in gaps), default=0.0)
    return {
        "rows": {
            str(size): {"run": count, "differ": sum(d.size == size for d in found)} for size, count in rows.items()
        },
        "differences": [dataclasses.asdict(drift) | more for drift, more in zip(found, gaps, strict=True)],
        "widest gap at a difference": round(widest, 4),
        "median gap of the two likeliest, all places": round(float(np.median(margins)), 4),
        "places as narrow as the widest": f"{int((margins <= widest).sum())} of {margins.size}",
        "largest logit": round(float(max(np.abs(text).max() for text in logits["in its dtype"])), 2),
    }


def machine() -> dict[str, Any]:
    """Returns the device, processor and software versions of this run."""
    device = jax.devices()[0]
    return {
        "kind": device.platform.upper(),
        "device": device.device_kind,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
    }


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    differ = {name: sum(row["differ"] for row in part["rows"].values()) for name, part in found["dtypes"].items()}
    widest = found["dtypes"]["bfloat16"]["widest gap at a difference"]
    return {
        "float32: no row differs": differ["float32"] == 0,
        f"bfloat16: rows differ only where two logits are within {PREDICTED_GAP}": widest <= PREDICTED_GAP,
    }


def report(found: dict[str, Any]) -> None:
    """Prints the measurement and its verdict, and writes both to the result file."""
    print((__doc__ or "").split("\n\n")[0])
    print(f"\nprediction: none in float32; in bfloat16 rows differ, none where the gap is over {PREDICTED_GAP}\n")
    for name, part in found["dtypes"].items():
        counts = ", ".join(f"{size}: {row['differ']} of {row['run']}" for size, row in part["rows"].items())
        print(f"{name}: rows that differ, by batch size: {counts}")
        for row in part["differences"]:
            print("  ", ", ".join(f"{key} {value}" for key, value in row.items()))
        for key in list(part)[2:]:
            print(f"   {key}: {part[key]}")
    found["verdict"] = verdict(found)
    for claim, holds in found["verdict"].items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    try:
        opened = gguf.open_file(arguments.model or smollm2_vs_llamacpp.fetch())
    except UserError as error:
        sys.exit(f"error: {error}")
    exact = opened.load(jnp.float32)
    found: dict[str, Any] = {"machine": machine(), "tokens": arguments.tokens, "prompts": len(PROMPTS), "dtypes": {}}
    for dtype in (jnp.float32, jnp.bfloat16):
        found["dtypes"][jnp.dtype(dtype).name] = measure(opened, dtype, arguments.tokens, exact)
    report(found)
    sys.exit(0 if all(found["verdict"].values()) else 1)


if __name__ == "__main__":
    main()
