"""Exceptions that a command reports in one line, without a traceback, and suggestions for misspelt words."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The one-line message names the problem and the fix. Exit status 2; see `jaxllm.commandline`."""


class Notice(UserWarning):
    """Warning for the user, one line, which commands print as `warning: …`."""


class RunError(Exception):
    """Failure of a run with valid input. The one-line message says where it stopped and what is saved. Status 1."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Returns the word that is spelt most like `word`, for "did you mean"."""
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]
