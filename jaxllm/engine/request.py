"""Request and result types of the generator, and validation of requests."""

import dataclasses

from jaxllm.decode import sampling as sampling_lib
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """Settings of one call of the generator, for all its prompts.

    Attributes:
      max_new_tokens: Maximum number of new tokens per prompt.
      sampling: Sampling options.
      seeds: One seed per prompt, in place of `sampling.seed`. If empty, all prompts use `sampling.seed`; their noise
        still differs, because it also depends on the prompt.
      stop: Stop strings; text ends before the first one.
      ignore_eos: Whether to continue after end-of-text ids.
    """

    max_new_tokens: int = 64
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    seeds: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """Continuation of one prompt.

    Attributes:
      prompt: Text of the prompt.
      text: Generated text, without the end-of-text token and up to a stop string.
      tokens: All sampled ids, including an end-of-text id and the ids of a stop string.
      reason: "end" (of text) | "stop" (a stop string) | "length" (max_new_tokens reached, or the context is full).
    """

    prompt: str
    text: str
    tokens: list[int]
    reason: str


@dataclasses.dataclass(frozen=True)
class Times:
    """Durations of one call in seconds, which do not overlap, and token counts.

    Attributes:
      compile: Compilation of programs that were not compiled before, and allocation of an empty cache.
      first_token: From the start of prefill to the first token of each prompt.
      decode: From the first token to the end.
      prompt_tokens: Number of prompt tokens over all prompts.
      new_tokens: Number of new tokens over all prompts.
      tokens_per_second: Decoding rate over all prompts, without first tokens; 0 if there were no others.
    """

    compile: float
    first_token: float
    decode: float
    prompt_tokens: int
    new_tokens: int
    tokens_per_second: float


def check(request: SampleRequest, prompts: int) -> None:
    """Validates a request for the given number of prompts.

    Raises:
      UserError: A value is invalid; the message names the flag.
    """
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
    """Returns the sampling options of each prompt, with its seed."""
    seeds = request.seeds or (request.sampling.seed,) * prompts
    return [dataclasses.replace(request.sampling, seed=seed) for seed in seeds]
