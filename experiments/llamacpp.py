"""llama.cpp in a separate process, so that a crash in its native code becomes a one-line error.

The package is cyllama (`pip install jaxllm[parity]`): its wheels contain a binary for any x86-64 processor with AVX2.
Builds with native compiler flags are not used because such a build crashed on processors with AMX.
"""

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
import pathlib
from typing import Any

import numpy as np

from jaxllm.errors import UserError

_F32 = 0  # cache dtype, in ggml's enumeration
_DISABLED = 0  # flash attention type, in llama.cpp's enumeration


class LlamaCpp:
    """GGUF model opened in llama.cpp, with a float32 KV cache of `context` tokens.

    Raises:
      UserError: from every method, if llama.cpp refuses the file or its process dies.
    """

    def __init__(self, path: pathlib.Path, context: int):
        self._path = path
        spawn = multiprocessing.get_context("spawn")  # forking is unsafe with JAX's threads
        self._process = concurrent.futures.ProcessPoolExecutor(1, spawn)
        self._call(_open, str(path), context)

    def ids(self, text: str, special: bool = False) -> list[int]:
        """Returns the token ids of a text, without a BOS token; with `special`, names of control tokens are parsed."""
        return self._call(_ids, text, special)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Returns the logits [T, V], float32, of a prompt of T token ids that starts a new sequence."""
        return self._call(_logits, ids.tolist())

    def close(self) -> None:
        self._process.shutdown()

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return self._process.submit(function, *arguments).result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(f"llama.cpp crashed in {function.__name__.strip('_')} of {self._path}") from None


_model: Any = None  # the child process's model and context
_context: Any = None


def _open(path: str, context: int) -> None:
    global _model, _context
    import cyllama.llama.llama_cpp as llama_cpp

    class Model(llama_cpp.LlamaModel):
        """Adds the `n_vocab` property that `get_logits_ith` of cyllama 0.2.18 needs and the base class lacks."""

        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    llama_cpp.disable_logging()
    _model = Model(path, llama_cpp.LlamaModelParams(), False)
    params = llama_cpp.LlamaContextParams()
    params.n_ctx = params.n_batch = context
    params.type_k = params.type_v = _F32
    params.flash_attn_type = _DISABLED  # flash attention multiplies queries in 16 bits
    params.n_threads = params.n_threads_batch = os.cpu_count()
    _context = llama_cpp.LlamaContext(_model, params, False)


def _ids(text: str, special: bool) -> list[int]:
    return list(_model.get_vocab().tokenize(text, False, special))


def _logits(ids: list[int]) -> np.ndarray:
    import cyllama.llama.llama_cpp as llama_cpp

    _context.kv_cache_clear()
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for position, token in enumerate(ids):
        batch.add(token, position, [0], True)
    _context.decode(batch)
    return np.stack([np.asarray(_context.get_logits_ith(i), np.float32) for i in range(len(ids))])
