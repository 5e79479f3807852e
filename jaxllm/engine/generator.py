"""Text generator on the host: batches and prefills prompts, runs the decode loop and decodes tokens to text."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm import programs
from jaxllm.config import Architecture
from jaxllm.decode import cache as cache_lib
from jaxllm.decode import sampling as sampling_lib
from jaxllm.decode import sharding, weights
from jaxllm.decode import state as state_lib
from jaxllm.decode.generate import DECODE_STEPS, PREFILL_CHUNK
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.decode.state import DecodeState
from jaxllm.engine.request import Result, SampleRequest, Times, check, options_of
from jaxllm.engine.row_output import RowOutput
from jaxllm.engine.weights import InferenceWeights, arrange
from jaxllm.errors import UserError
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.rows import Figure

_MIN_CAPACITY = 128  # short requests of any length share one compilation

# Callback with (index of the prompt, new text).
TextCallback = Callable[[int, str], None]
# Check of (number of sequences, maximum tokens per sequence) that raises UserError if they do not fit.
AdmissionCheck = Callable[[int, int], None]


def encode(prompt: str, tokenizer: Tokenizer, model: Architecture, capacity: int | None = None) -> np.ndarray:
    """Encodes a prompt as the beginning of a document, with the tokenizer's begin token if it has one.

    Args:
      prompt: Text of the prompt.
      tokenizer: Tokenizer of the model.
      model: Architecture of the model.
      capacity: Tokens per row in the cache; None means the model's context length.

    Raises:
      UserError: The prompt has no tokens, has a token outside the model's vocabulary, or is so long that no further
        token fits.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = np.concatenate([np.array(begin, np.int32), tokenizer.encode(prompt)])
    if not len(tokens):
        raise UserError("--prompt is empty and the tokenizer has no begin token; give at least one character")
    largest = int(tokens.max())
    if largest >= model.vocab_size:
        raise UserError(
            f"--prompt has a special token of id {largest}, but the model's vocab_size is {model.vocab_size}; remove it"
        )
    context = model.context_length
    limit = min(context, capacity or context)
    if len(tokens) >= limit:
        cache = "" if limit == context else f" (the cache has space for {limit})"
        raise UserError(
            f"--prompt has {len(tokens)} tokens, but the model's context_length is {context}{cache}; "
            f"shorten it to {limit - 1} or fewer"
        )
    return tokens


def capacity_for(longest: int, max_new_tokens: int, model: Architecture) -> int:
    """Returns the capacity in tokens per row: a power of two, to limit recompilation, at most the context length."""
    needed = max(longest + max_new_tokens, _MIN_CAPACITY)
    return min(1 << (needed - 1).bit_length(), model.context_length)


class Generator:
    """Text generator: a model, its weights, a tokenizer and the compiled programs.

    Args:
      model: Architecture of the model.
      params: Result of `engine.weights.load_weights`, or a parameter tree as in training, of any floating-point dtype,
        which is converted to `dtype` and to the layout of inference.
      tokenizer: Tokenizer of the model.
      dtype: Dtype of weights and computation, and of the cache if `cache_dtype` is None.
      cache_dtype: Dtype of the cache; int8 adds scales.
      capacity: Tokens per row in the cache; None allocates what each call needs, up to the model's context length.
      chunk: Prompt tokens per row and prefill call.
      steps: Tokens per row and decode call.
      use_cache: Whether to use a KV cache; False runs a full forward pass per token.
      admit: Admission check, called before a call allocates anything. If it raises, the call ends and the generator
        remains usable.
      mesh: Device mesh with axes of `parallel.mesh`, over which `params` are sharded; None for one device.

    Attributes:
      live: Bytes on the device in the last call: "weights" and, if there was one, "KV cache".

    Raises:
      UserError: The tokenizer has ids outside the model's vocabulary.
    """

    def __init__(
        self,
        model: Architecture,
        params: Any,
        tokenizer: Tokenizer,
        dtype: jax.typing.DTypeLike,
        *,
        cache_dtype: jax.typing.DTypeLike | None = None,
        capacity: int | None = None,
        chunk: int = PREFILL_CHUNK,
        steps: int = DECODE_STEPS,
        use_cache: bool = True,
        admit: AdmissionCheck | None = None,
        mesh: Mesh | None = None,
    ):
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocab_size is {model.vocab_size}; "
                "use the tokenizer that the model was trained with"
            )
        self._model = model
        self._layout = weights.layout_for(jax.default_backend())
        self._mesh = mesh
        if not isinstance(params, InferenceWeights):
            params = arrange(jax.tree.map(lambda x: jnp.asarray(x, dtype), params), model, dtype, mesh)
        self._params, self._quantize = params.tree, params.quantize
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._cache_dtype = dtype if cache_dtype is None else cache_dtype
        self._capacity = capacity
        self._chunk, self._steps = chunk, steps
        self._use_cache = use_cache
        self._admit = admit
        self.live: dict[str, int] = {}
        self._compiled: dict[tuple[str, int, int], jax.stages.Compiled] = {}

    def encode(self, prompt: str) -> np.ndarray:
        """Encodes a prompt as the beginning of a document.

        Raises:
          UserError: The prompt is empty, has a token outside the vocabulary, or leaves no space for a new token.
        """
        return encode(prompt, self._tokenizer, self._model, self._capacity)

    def capacity_for(self, longest: int, max_new_tokens: int) -> int:
        """Returns the capacity in tokens per row for the longest prompt and the number of new tokens."""
        if self._capacity is not None:
            return min(self._capacity, self._model.context_length)
        return capacity_for(longest, max_new_tokens, self._model)

    def generate(
        self, prompts: Sequence[str], request: SampleRequest, on_text: TextCallback | None = None
    ) -> tuple[list[Result], Times]:
        """Continues all prompts in one batch.

        Args:
          prompts: Texts to continue.
          request: Settings for all prompts.
          on_text: Callback for new text of each prompt, called as soon as no later token can change that text.

        Returns:
          (one result per prompt, times of the call).

        Raises:
          UserError: A setting or a prompt is invalid, or `admit` refuses the call; the message names the flag.
        """
        check(request, len(prompts))
        ids = [self.encode(prompt) for prompt in prompts]
        capacity = self.capacity_for(max(map(len, ids)), request.max_new_tokens)
        if self._admit is not None:
            self._admit(len(ids), capacity)
        ends = () if request.ignore_eos else tuple(self._tokenizer.end_ids)
        rows = [RowOutput(self._tokenizer, request.stop, ends) for _ in prompts]
        emit = on_text or (lambda _index, _text: None)

        # Rows that fill up the batch of every device; their outputs are not used.
        options = options_of(request, len(ids))
        padding = -len(ids) % sharding.size_of(self._mesh).data
        ids, options = ids + ids[-1:] * padding, options + options[-1:] * padding

        began = time.perf_counter()
        decode = self._program("decode" if self._use_cache else "decode_without_cache", len(ids), capacity)
        prefill = self._program("prefill", len(ids), capacity) if self._use_cache else None
        state = self._start(ids, options, request.max_new_tokens, capacity, ends)
        ready = time.perf_counter()
        if prefill is not None:
            state = self._prefill(prefill, state, ids, capacity)
        first = 0.0
        limit = 1  # decode the first token alone, so that it is shown sooner
        while True:
            state, buffer = decode(self._params, state, np.int32(limit))
            tokens, finished = np.asarray(buffer), np.array(state.finished)
            first, limit = first or time.perf_counter(), self._steps
            for index, row in enumerate(rows):
                text = row.push(tokens[index])
                if text:
                    emit(index, text)
                finished[index] |= row.stopped
            if finished[: len(rows)].all():
                break
            state = state.replace(finished=jnp.array(finished))
        ended = time.perf_counter()
        self.live = {"weights": device_lib.tree_bytes(self._params)}
        if prefill is not None:
            self.live["KV cache"] = device_lib.tree_bytes(state.cache.kv)

        for index, row in enumerate(rows):
            text = row.finish()
            if text:
                emit(index, text)
        reasons = np.asarray(state.reason)[: len(rows)].tolist()
        results = [
            Result(prompt, row.text, row.tokens, "stop" if row.stopped else state_lib.REASONS[reason])
            for prompt, row, reason in zip(prompts, rows, reasons, strict=True)
        ]
        new = sum(len(row.tokens) for row in rows)
        rate = (new - len(rows)) / (ended - first) if ended > first else 0.0
        prompt_tokens = sum(map(len, ids[: len(rows)]))
        times = Times(ready - began, first - ready, ended - first, prompt_tokens, new, rate)
        return results, times

    def compiled_peaks(self) -> dict[str, Figure]:
        """Returns XLA's peak bytes of each compiled program, by name; see `ledger.compiled`.

        If a program was compiled for several shapes, the most recently compiled one counts.
        """
        newest = {name: program for (name, _, _), program in self._compiled.items()}
        return {name: inspection.figures(program)["peak"] for name, program in newest.items()}

    def _program(self, name: str, batch: int, capacity: int) -> jax.stages.Compiled:
        """Returns the executable of a program for these sizes, and compiles it at its first use."""
        key = (name, batch, capacity)
        if key not in self._compiled:
            width = min(self._chunk, capacity) if name == "prefill" else self._steps
            options: dict[str, Any] = {"layout": self._layout, "mesh": self._mesh, "quantize": self._quantize}
            if self._use_cache:
                options["cache_dtype"] = self._cache_dtype
            program = getattr(programs, name)(self._model, batch, width, capacity, self._dtype, **options)
            self._compiled[key] = program.compile()
        return self._compiled[key]

    def _start(
        self,
        ids: Sequence[np.ndarray],
        options: Sequence[SamplingOptions],
        max_new_tokens: int,
        capacity: int,
        ends: Sequence[int],
    ) -> DecodeState:
        B = len(ids)
        sampling = sampling_lib.make_params(options, ids, self._tokenizer.vocab_size)
        # The capacity bounds every row; clamp, because a larger value may not fit in an int32.
        limits, end_ids = [min(max_new_tokens, capacity)] * B, [ends] * B
        dtype = self._cache_dtype if self._use_cache else self._dtype
        like = sharding.abstract_state(
            self._model, B, capacity, dtype, self._layout, self._mesh, with_cache=self._use_cache
        )
        if not self._use_cache:
            state = state_lib.start_without_cache(self._model, ids, capacity, sampling, limits, end_ids)
        else:
            state = state_lib.start(self._model, cache_lib.create_like(like.cache), sampling, limits, end_ids)
        return state if self._mesh is None else sharding.place(state, like)

    def _prefill(
        self, program: Callable[..., Any], state: DecodeState, ids: Sequence[np.ndarray], capacity: int
    ) -> DecodeState:
        """Prefills the prompts in chunks of fixed size, so one compilation serves prompts of any length."""
        chunk = min(self._chunk, capacity)
        for begin in range(0, max(map(len, ids)), chunk):
            tokens, valid = np.zeros((len(ids), chunk), np.int32), np.zeros((len(ids), chunk), bool)
            for row, prompt in enumerate(ids):
                part = prompt[begin : begin + chunk]
                tokens[row, : len(part)], valid[row, : len(part)] = part, True
            state = program(self._params, state, tokens, valid)
        return state
