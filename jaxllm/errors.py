"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """Bad input, told in one line that names what is wrong and the fix.

    A command turns it into that line on standard error and exit status 2; see `jaxllm.commandline`.
    """
