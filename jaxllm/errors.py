"""The exceptions that a command tells in one line, without a traceback."""


class UserError(Exception):
    """Bad input: the line names what is wrong and the fix. Exit status 2; see `jaxllm.commandline`."""


class RunError(Exception):
    """A run that had to stop though its input was good: the line names where and what is left. Exit status 1."""
