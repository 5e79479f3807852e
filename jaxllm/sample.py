"""Continues prompts with a trained model: python -m jaxllm.sample --model WORKDIR --prompt "…" [--prompt "…"]

One prompt's text appears as it is made. Several are continued together, and each is printed under a header.
The ledger of it, before and after, and what it took, compilation apart, are on standard error: prompts that do not fit
the device are refused before anything is allocated. With --json, standard output has one JSON object and nothing else.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from absl import flags

from jaxllm import architectures, commandline
from jaxllm import config as config_lib
from jaxllm.config import Config
from jaxllm.decode import engine
from jaxllm.decode.engine import CHUNK, Generator
from jaxllm.decode.request import Request, Result, Times, check
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.errors import UserError
from jaxllm.interop import tokenizer as tokenizer_lib
from jaxllm.ledger import bill, shortage
from jaxllm.ledger.sampling_bill import SamplingBill
from jaxllm.train import checkpoint
from jaxllm.train.precision import policy_for

_MODEL = flags.DEFINE_string("model", None, "Workdir of a training run.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue; repeat the flag for several.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Most tokens made for a prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token every time.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw among this many likeliest tokens; 0 is all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw among the fewest likeliest tokens that have this probability.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Draw among tokens this many times as likely as the likeliest.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Over 1 makes tokens of the prompt and the text less likely.")
_SEED = flags.DEFINE_integer("seed", 0, "The same seed, prompt and settings give the same text.")
_STOP = flags.DEFINE_multi_string("stop", [], "Text to stop before; repeat the flag for several.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
_NO_CACHE = flags.DEFINE_bool("no_cache", False, "Recompute keys and values for every token.")
_IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on past the end of text.")


def main() -> None:
    workdir = _MODEL.value
    if not workdir:
        raise UserError("no --model given; for instance --model runs/quickstart")
    if not _PROMPT.value:
        raise UserError('no --prompt given; for instance --prompt "def main("')
    request = Request(
        max_new_tokens=_MAX_NEW_TOKENS.value,
        sampling=SamplingOptions(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            repetition_penalty=_PENALTY.value,
            seed=_SEED.value,
        ),
        stop=tuple(_STOP.value),
        ignore_eos=_IGNORE_EOS.value,
    )
    check(request)  # before the weights are read, which can take minutes
    sampled = _billed(workdir, request)
    with shortage.explained(lambda error: sampled.explain_shortage("while sampling", error)):
        _sample(workdir, request, sampled)


def _billed(workdir: str, request: Request) -> SamplingBill:
    """The bill, shown; before the weights are read.

    Raises:
      UserError: it does not fit this machine's device.
    """
    config = _config(workdir)
    model, tokenizer = architectures.resolve(config.model), tokenizer_lib.load(config.data.tokenizer)
    longest = max(len(engine.encode(prompt, tokenizer, model)) for prompt in _PROMPT.value)
    context = engine.capacity_for(longest, request.max_new_tokens, model)
    made = SamplingBill(bill.title(config), model, len(_PROMPT.value), context, CHUNK)
    if _NO_CACHE.value:
        _tell(["ledger: --no_cache keeps no cache; this is the bill with one"])
    _tell(made.lines())
    made.admit()
    return made


def _config(workdir: str) -> Config:
    """The run's configuration; that of the checkpoint where the workdir has lost its own."""
    try:
        return config_lib.from_dict(json.loads((pathlib.Path(workdir) / "config.json").read_text()))
    except (OSError, ValueError):
        return checkpoint.load_model(workdir)[0]


def _sample(workdir: str, request: Request, sampled: SamplingBill) -> None:
    config, params = checkpoint.load_model(workdir)
    generator = Generator(
        architectures.resolve(config.model),
        params,
        tokenizer_lib.load(config.data.tokenizer),
        policy_for("auto", jax.default_backend()).compute,
        use_cache=not _NO_CACHE.value,
    )
    del params
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
    if not _NO_CACHE.value:
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
