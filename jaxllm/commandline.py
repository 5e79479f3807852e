"""What every command shares: flags, the config flag, and how failures reach a person.

Exit status: 0 success; 2 bad input, told in one line; 1 a failure of ours, with its traceback;
130 and 143 stopped by SIGINT or SIGTERM, as a shell would report it.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from jaxllm import config as config_lib
from jaxllm.config import overrides
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import spec as devices

FLAGS = flags.FLAGS


def define_config() -> None:
    """Adds `--config FILE.py` with `--config.a.b=value` overrides; read it with `load_config`."""
    config_flags.DEFINE_config_file("config", None, "The run: a Python file whose get_config() returns a Config.")


def config_file() -> str:
    """The path given to `--config`."""
    return FLAGS["config"].config_filename  # type: ignore[attr-defined]


def config_overrides() -> dict[str, Any]:
    """Field -> value of the `--config.a.b=value` that were given beside `--config`."""
    return dict(config_flags.get_override_values(FLAGS["config"]))


def load_config() -> config_lib.Config:
    """The tree that `--config` and its overrides describe, with every type checked.

    Raises:
      UserError: no `--config`, a file that cannot be read, or one that returns something else.
    """
    config = FLAGS.config
    if config is None:
        raise UserError("no --config given; for instance --config configs/quickstart.py")
    if not isinstance(config, config_lib.Config):
        path = config_file()
        try:  # a file that could not be loaded tells so when it is touched
            _ = config.model
        except OSError as error:
            raise UserError(f"--config {path}: no such file, or it cannot be read") from error
        raise UserError(f"--config {path}: get_config() returned {type(config).__name__}, not a jaxllm.config.Config")
    overrides.split_lists(config)
    overrides.check_types(config)
    return config


def run(main: Callable[[], int | None], argv: Sequence[str] | None = None) -> None:
    """Parses the flags, runs `main`, and exits as the module's docstring says."""
    argv = list(sys.argv if argv is None else argv)
    # Libraries log the failures that they also raise; a person is told once.
    logging.set_verbosity(logging.FATAL)
    devices.claim_memory()
    try:
        if {"--help", "-h", "-help"} & set(argv[1:]):
            print(_help(main))
            sys.exit(0)
        _parse(argv)
        sys.exit(main() or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # whoever read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _parse(argv: list[str]) -> None:
    _check_override_keys(argv)
    try:
        rest = FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(_own_flags()), n=1, cutoff=0.0)
        raise UserError(f"unknown flag --{error.flagname}; did you mean --{near[0]}?") from error
    except flags.Error as error:
        raise UserError(_one_line(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, ImportError, NameError) as error:
        raise UserError(f"--config: {type(error).__name__}: {_one_line(error)}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; every option has a name (--name=value)")


def _check_override_keys(argv: list[str]) -> None:
    """An unknown `--config.a.b` fails before anything is loaded, naming the nearest key."""
    known = overrides.field_paths(config_lib.Config())
    for argument in argv[1:]:
        match = re.match(r"--?(no)?config\.([^=]+)", argument)
        if match and match[2] not in known:
            raise overrides.unknown_key(match[2])


def _one_line(error: BaseException) -> str:
    """The last line that says something: the flag libraries put a traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _own_flags() -> dict[str, flags.Flag]:
    """Flags that a command defined, without those of the libraries it imports."""
    modules = FLAGS.flags_by_module_dict()
    return {
        flag.name: flag
        for module, defined in modules.items()
        if module.endswith("__main__.py") or module == sys.argv[0] or "jaxllm" in module
        for flag in defined
    }


def _help(main: Callable[[], int | None]) -> str:
    lines = [(sys.modules[main.__module__].__doc__ or "").strip(), "", "Flags:"]
    for name, flag in sorted(_own_flags().items()):
        default = "" if flag.default is None else f" (default: {flag.default})"
        lines.append(f"  --{name:<20} {flag.help}{default}")
    return "\n".join(lines)
