"""What a caller of the generator asks, and what it gets back."""

import dataclasses

from jaxllm.decode import sampling as sampling_lib
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """What is asked about every prompt of a call.

    Attributes:
      seeds: one for each prompt, in place of the options'; empty gives all the same, and each its own noise for it.
      stop: strings that end a text, which is cut before them.
      ignore_eos: go on past end-of-text ids.
    """

    max_new_tokens: int = 64
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    seeds: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt's continuation.

    Attributes:
      text: without the end-of-text token, and cut before a stop string.
      tokens: every id drawn, an end-of-text id and those of a stop string included.
      reason: "end" (of text) | "stop" (a stop string) | "length" (max_new_tokens, or the context is full).
    """

    prompt: str
    text: str
    tokens: list[int]
    reason: str


@dataclasses.dataclass(frozen=True)
class Times:
    """Where a call's time went, in seconds; no figure has another's time in it.

    Attributes:
      compile: of compiling, where the programs were not there already, and making an empty cache.
      first_token: from the prompts to the first token of each.
      decode: from then on.
      tokens_per_second: of decoding, over all prompts, first tokens left out; 0 where there were no others.
    """

    compile: float
    first_token: float
    decode: float
    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float


def check(request: SampleRequest, prompts: int) -> None:
    """Raises UserError, naming the flag, where a value makes no sense for so many prompts."""
    sampling_lib.check(request.sampling)
    if request.seeds and len(request.seeds) != prompts:
        raise UserError(
            f"--seed is given {len(request.seeds)} times for {prompts} prompts; give one for all, or one for each"
        )
    for options in options_of(request, prompts):
        sampling_lib.check(options)
    if request.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens is {request.max_new_tokens}; it must be at least 1")
    if not all(request.stop):
        raise UserError("--stop is empty; give the text to stop at, or leave the flag out")


def options_of(request: SampleRequest, prompts: int) -> list[SamplingOptions]:
    """The settings of each of so many prompts."""
    seeds = request.seeds or (request.sampling.seed,) * prompts
    return [dataclasses.replace(request.sampling, seed=seed) for seed in seeds]
