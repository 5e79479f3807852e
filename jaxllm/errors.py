"""Exceptions that a command reports in one line, without a traceback."""


class UserError(Exception):
    """Bad input. The one-line message names the problem and the fix. Exit status 2; see `jaxllm.commandline`."""


class RunError(Exception):
    """Failure of a run with valid input. The one-line message says where it stopped and what is saved. Status 1."""
