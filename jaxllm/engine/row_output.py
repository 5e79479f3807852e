"""Output of one prompt during generation, from tokens to the text that is shown."""

from collections.abc import Sequence

import numpy as np

from jaxllm.decode import state as state_lib
from jaxllm.engine.stop_strings import StopStream
from jaxllm.interop.tokenizer import StreamDecoder, Tokenizer


class RowOutput:
    """Output of one prompt during generation: its tokens and its text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], ends: Sequence[int]):
        self._decoder = StreamDecoder(tokenizer)
        self._stream = StopStream(stop)
        self._ends = ends
        self.tokens: list[int] = []
        self.text = ""

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text."""
        return self._stream.stopped

    def push(self, tokens: np.ndarray) -> str:
        """Appends this row of a token buffer; returns the new text that no later token can change."""
        text = ""
        for token in tokens[tokens != state_lib.PAD].tolist():
            if self.stopped:  # sampled before the host found the stop string
                break
            self.tokens.append(token)
            if token not in self._ends:
                text += self._stream.push(self._decoder.push([token]))
        self.text += text
        return text

    def finish(self) -> str:
        """Ends the output; returns the text that was held back."""
        text = self._stream.push(self._decoder.finish()) + self._stream.finish()
        self.text += text
        return text
