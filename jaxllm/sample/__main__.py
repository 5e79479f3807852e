"""Continues prompts with a model, or chats: python -m jaxllm.sample --model MODEL --prompt "…" [--prompt "…"] [--chat]

MODEL is the workdir of a training run, a Hugging Face folder, a .gguf file, or an id of the Hugging Face hub.

The text of a single prompt is streamed. Several prompts are continued in one batch, and each is printed under a header.
Standard error has the memory ledger, before and after the run, and the timings, with compilation listed separately.
Prompts that do not fit on the device are refused before anything is allocated. With --json, standard output has one
JSON object and nothing else.
"""

import copy
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

from jaxllm import commandline
from jaxllm.checkpoints import checkpoint, open_any
from jaxllm.config import inference_mesh
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.decode import cache as cache_lib
from jaxllm.decode.generate import PREFILL_CHUNK
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine import generator as engine
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import Result, SampleRequest, Times, check
from jaxllm.errors import UserError
from jaxllm.interop import peft
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.ledger import bill as bill_lib
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.formula.exact.formats import AUTO, INT8
from jaxllm.ledger.runtime.sampling import SamplingBill
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.sample import chat, quantization
from jaxllm.sample.quantization import Quantization
from jaxllm.step.precision import policy_for

_MODEL = flags.DEFINE_string("model", None, "Workdir of a run, Hugging Face folder, .gguf file, or Hugging Face id.")
_ADAPTER = flags.DEFINE_string("adapter", None, "Folder with a LoRA adapter in PEFT format, to add to the model.")
_CHAT = flags.DEFINE_bool("chat", False, "Chat: each --prompt is a turn; without --prompt, turns are read from stdin.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue; repeat the flag for more prompts.")
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", None, "Maximum new tokens per prompt (default: 64, or 512 with --chat)."
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Sampling temperature; 0 always picks the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens; 0 means all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the fewest most likely tokens whose probability reaches p.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Sample from tokens at least this fraction as likely as the most likely.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1, tokens already in the text become less likely.")
_SEED = flags.DEFINE_multi_integer(
    "seed",
    [0],
    "Random seed; equal seeds, prompts and settings give equal text. Repeat the flag for one seed per prompt.",
)
_STOP = flags.DEFINE_multi_string("stop", [], "Stop before this text; repeat the flag for more stop strings.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.")
_CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype", AUTO, [AUTO, INT8], "KV cache dtype: auto is the compute dtype; int8 takes less memory."
)
_QUANTIZE = flags.DEFINE_string("quantize", None, f"Quantize weights: {' | '.join(quantization.NAMES)}.")
_GROUP = flags.DEFINE_string("group", "", f"Inputs per scale: {' | '.join(quantization.GROUPS)}.")
_CALIBRATION = flags.DEFINE_string("calibration", None, "Text file for gptq and awq: typical text of the model's use.")
_MESH = flags.DEFINE_string("mesh", "tensor=1", "Devices to sample on: tensor=N, or data=M,tensor=N.")
_NO_CACHE = flags.DEFINE_bool("no_cache", False, "Recompute keys and values for every token instead of caching them.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Continue after an end-of-text token.")


def main() -> None:
    spec = _MODEL.value
    if not spec:
        raise UserError("no --model given; for example --model runs/quickstart")
    if not _PROMPT.value and not _CHAT.value:
        raise UserError('no --prompt given; for example --prompt "def main(", or use --chat')
    tokens = _MAX_NEW_TOKENS.value
    if tokens is None:
        tokens = chat.MAX_NEW_TOKENS if _CHAT.value else SampleRequest.max_new_tokens
    request = SampleRequest(
        max_new_tokens=tokens,
        sampling=SamplingOptions(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            repetition_penalty=_PENALTY.value,
            seed=_SEED.value[0],
        ),
        seeds=tuple(_SEED.value) if len(_SEED.value) > 1 else (),
        stop=tuple(_STOP.value),
        ignore_eos=_IGNORE_EOS.value,
    )
    if _NO_CACHE.value and (_CHAT.value or _CACHE_DTYPE.value != AUTO):
        other = "--chat" if _CHAT.value else f"--cache_dtype={_CACHE_DTYPE.value}"
        raise UserError(f"--no_cache cannot be combined with {other}; remove one of them")
    commandline.keep_compiled_programs()
    check(request, len(_PROMPT.value))  # before the weights are read, which can take minutes
    quantize = quantization.parse(_QUANTIZE.value, _GROUP.value, _CALIBRATION.value)
    sizes = inference_mesh.parse(_MESH.value)
    mesh = _make_mesh(sizes)
    opened = open_any.open_any(spec)
    if _ADAPTER.value:
        opened = peft.with_adapters(opened, pathlib.Path(_ADAPTER.value).expanduser())
    quantize.check(opened.model, sizes)
    dtype = policy_for("auto", jax.default_backend()).compute_dtype
    if _CHAT.value:
        chat.run(
            opened,
            request,
            _PROMPT.value,
            lambda tokens: _bill(opened, 1, tokens, sizes, quantize),
            dtype,
            cache_lib.dtype_of(_CACHE_DTYPE.value, dtype),
            lambda: quantize.load(opened, dtype, mesh),
            mesh,
            as_json=_JSON.value,
        )
        return
    tokenizer = _tokenizer(opened)
    bill = _admit(opened, tokenizer, request, sizes, quantize)
    with out_of_memory.explained(lambda error: bill.oom_message("while sampling", error)):
        _sample(opened, tokenizer, request, bill, dtype, mesh, quantize)


def _make_mesh(sizes: InferenceMesh) -> Mesh | None:
    """Returns the device mesh, or None for one device.

    Raises:
      UserError: There are too few devices.
    """
    if sizes.count > jax.device_count():
        raise UserError(
            f"--mesh {sizes} needs {sizes.count} devices, but this machine has {jax.device_count()} "
            f"{jax.default_backend()} device(s); give a smaller mesh"
        )
    return None if sizes.count == 1 else mesh_lib.make_mesh(sizes.config)


def _tokenizer(opened: Pretrained) -> Tokenizer:
    """Returns the model's tokenizer with all end-of-text ids of the model.

    Raises:
      UserError: The model has no tokenizer.
    """
    if opened.text.tokenizer is None:
        raise UserError(f"{opened.source} has no tokenizer.json; copy it there from the model's release")
    tokenizer = copy.copy(opened.text.tokenizer)
    tokenizer.end_ids = opened.text.end_ids or tokenizer.end_ids
    return tokenizer


def _admit(
    opened: Pretrained, tokenizer: Tokenizer, request: SampleRequest, sizes: InferenceMesh, quantize: Quantization
) -> SamplingBill:
    """Prints and checks the memory bill of the run, before the weights are read.

    Raises:
      UserError: A prompt is invalid, or the run does not fit on this machine's device.
    """
    longest = max(len(engine.encode(prompt, tokenizer, opened.model)) for prompt in _PROMPT.value)
    context = engine.capacity_for(longest, request.max_new_tokens, opened.model)
    bill = _bill(opened, len(_PROMPT.value), context, sizes, quantize)
    commandline.log(*bill.summary_lines())
    bill.require_fit()
    return bill


def _bill(opened: Pretrained, batch: int, context: int, sizes: InferenceMesh, quantize: Quantization) -> SamplingBill:
    path = pathlib.Path(opened.source)
    config = checkpoint.stored_config(path)
    name = bill_lib.title(config) if config else path.name
    cache = None if _NO_CACHE.value else _CACHE_DTYPE.value
    return SamplingBill(
        name, opened.model, batch, context, PREFILL_CHUNK, cache=cache, weights=quantize.name, mesh=sizes
    )


def _sample(
    opened: Pretrained,
    tokenizer: Tokenizer,
    request: SampleRequest,
    bill: SamplingBill,
    dtype: Any,
    mesh: Mesh | None,
    quantize: Quantization,
) -> None:
    cache = cache_lib.dtype_of(_CACHE_DTYPE.value, dtype)
    options: dict[str, Any] = {"cache_dtype": cache, "use_cache": not _NO_CACHE.value, "mesh": mesh}
    generator = Generator(opened.model, quantize.load(opened, dtype, mesh), tokenizer, dtype, **options)
    streaming = len(_PROMPT.value) == 1 and not _JSON.value
    results, times = generator.generate(_PROMPT.value, request, _show if streaming else None)
    if _JSON.value:
        print(json.dumps(_as_json(results, times), ensure_ascii=False))
    elif streaming:
        print()
    else:
        for number, result in enumerate(results, 1):
            print(f"=== prompt {number}: {result.prompt!r} ({result.reason})\n{result.text}")
    sys.stdout.flush()
    commandline.log(*bill.reconcile(generator.live, generator.compiled_peaks()), _describe(times))


def _show(_index: int, text: str) -> None:
    print(text, end="", flush=True)


def _as_json(results: list[Result], times: Times) -> dict[str, Any]:
    return {"results": [dataclasses.asdict(result) for result in results], "times": dataclasses.asdict(times)}


def _describe(times: Times) -> str:
    return (
        f"first token after {times.first_token:.3f} s ({times.prompt_tokens} prompt tokens), "
        f"then {times.tokens_per_second:.1f} tokens/s ({times.new_tokens} tokens in total), "
        f"excluding {times.compile:.2f} s of compilation"
    )


if __name__ == "__main__":
    commandline.run(main)
