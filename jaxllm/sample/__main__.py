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

from jaxllm import commandline
from jaxllm.checkpoints import checkpoint, open_any
from jaxllm.decode import cache as cache_lib
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine import generator as engine
from jaxllm.engine.generator import CHUNK, Generator
from jaxllm.engine.request import Result, SampleRequest, Times, check
from jaxllm.errors import UserError
from jaxllm.interop import peft
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.ledger import bill
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.formula.exact.formats import AUTO, INT8
from jaxllm.ledger.runtime.sampling import SamplingBill
from jaxllm.sample import chat
from jaxllm.step.precision import policy_for

_MODEL = flags.DEFINE_string("model", None, "Workdir, Hugging Face folder, .gguf file, or id of the hub.")
_ADAPTER = flags.DEFINE_string("adapter", None, "Folder of low-rank adapters in PEFT's layout, to add to the model.")
_CHAT = flags.DEFINE_bool("chat", False, "Talk: each prompt is a turn; without one, lines are read.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue; repeat the flag for several.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", None, "Most tokens made for a prompt; 64, in a chat 512.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token every time.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw among this many likeliest tokens; 0 is all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw among the fewest likeliest tokens that have this probability.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Draw among tokens this many times as likely as the likeliest.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Over 1 makes tokens of the prompt and the text less likely.")
_SEED = flags.DEFINE_multi_integer(
    "seed", [0], "The same seed, prompt and settings give the same text; repeat the flag to give each prompt its own."
)
_STOP = flags.DEFINE_multi_string("stop", [], "Text to stop before; repeat the flag for several.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
_CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype", AUTO, [AUTO, INT8], "Of keys and values: auto is what the model computes in; int8 takes less room."
)
_NO_CACHE = flags.DEFINE_bool("no_cache", False, "Recompute keys and values for every token.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on past the end of text.")


def main() -> None:
    spec = _MODEL.value
    if not spec:
        raise UserError("no --model given; for instance --model runs/quickstart")
    if not _PROMPT.value and not _CHAT.value:
        raise UserError('no --prompt given; for instance --prompt "def main(", or --chat')
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
        raise UserError(f"--no_cache and {other} do not go together: leave out one of them")
    check(request, len(_PROMPT.value))  # before the weights are read, which can take minutes
    opened = open_any.open_any(spec)
    if _ADAPTER.value:
        opened = peft.with_adapters(opened, pathlib.Path(_ADAPTER.value).expanduser())
    dtype = policy_for("auto", jax.default_backend()).compute_dtype
    if _CHAT.value:
        chat.run(
            opened,
            request,
            _PROMPT.value,
            lambda tokens: _bill(opened, 1, tokens),
            dtype,
            cache_lib.dtype_of(_CACHE_DTYPE.value, dtype),
            as_json=_JSON.value,
        )
        return
    tokenizer = _tokenizer(opened)
    sampled = _billed(opened, tokenizer, request)
    with out_of_memory.explained(lambda error: sampled.oom_message("while sampling", error)):
        _sample(opened, tokenizer, request, sampled, dtype)


def _tokenizer(opened: Pretrained) -> Tokenizer:
    """Returns the model's tokenizer with all end-of-text ids of the model.

    Raises:
      UserError: The model has no tokenizer.
    """
    if opened.text.tokenizer is None:
        raise UserError(f"{opened.source} has no tokenizer.json; copy it from the model's release into the folder")
    tokenizer = copy.copy(opened.text.tokenizer)
    tokenizer.end_ids = opened.text.end_ids or tokenizer.end_ids
    return tokenizer


def _billed(opened: Pretrained, tokenizer: Tokenizer, request: SampleRequest) -> SamplingBill:
    """Prints and checks the memory bill of the run, before the weights are read.

    Raises:
      UserError: A prompt is invalid, or the run does not fit on this machine's device.
    """
    longest = max(len(engine.encode(prompt, tokenizer, opened.model)) for prompt in _PROMPT.value)
    context = engine.capacity_for(longest, request.max_new_tokens, opened.model)
    made = _bill(opened, len(_PROMPT.value), context)
    _tell(made.lines())
    made.admit()
    return made


def _bill(opened: Pretrained, batch: int, context: int) -> SamplingBill:
    path = pathlib.Path(opened.source)
    config = checkpoint.stored_config(path)
    name = bill.title(config) if config else path.name
    cache = None if _NO_CACHE.value else _CACHE_DTYPE.value
    return SamplingBill(name, opened.model, batch, context, CHUNK, cache=cache)


def _sample(
    opened: Pretrained, tokenizer: Tokenizer, request: SampleRequest, sampled: SamplingBill, dtype: Any
) -> None:
    cache = cache_lib.dtype_of(_CACHE_DTYPE.value, dtype)
    how: dict[str, Any] = {"cache_dtype": cache, "use_cache": not _NO_CACHE.value}
    generator = Generator(opened.model, opened.load(dtype), tokenizer, dtype, **how)
    live = len(_PROMPT.value) == 1 and not _JSON.value
    results, times = generator.generate(_PROMPT.value, request, _show if live else None)
    if _JSON.value:
        print(json.dumps(_as_json(results, times), ensure_ascii=False))
    elif live:
        print()
    else:
        for number, result in enumerate(results, 1):
            print(f"=== prompt {number}: {result.prompt!r} ({result.reason})\n{result.text}")
    sys.stdout.flush()
    _tell(sampled.reconcile(generator.live, generator.compiled_peaks()))
    _tell([_describe(times)])


def _tell(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _show(_index: int, text: str) -> None:
    print(text, end="", flush=True)


def _as_json(results: list[Result], times: Times) -> dict[str, Any]:
    return {"results": [dataclasses.asdict(result) for result in results], "times": dataclasses.asdict(times)}


def _describe(times: Times) -> str:
    return (
        f"first token {times.first_token:.3f} s ({times.prompt_tokens} prompt tokens), "
        f"then {times.tokens_per_second:.1f} tokens/s ({times.new_tokens} tokens in all); "
        f"compilation {times.compile:.2f} s apart"
    )


if __name__ == "__main__":
    commandline.run(main)
