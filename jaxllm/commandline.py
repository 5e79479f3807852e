"""Command-line code shared by every command: flags, `--config`, error reporting and exit status.

Exit status: 0 success; 2 bad input, reported in one line; 1 a failed run, reported in one line, or a bug, with its
traceback; 130 and 143 stopped by SIGINT or SIGTERM, as a shell reports them.
"""

import os
import pathlib
import platform
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags, logging
from ml_collections import config_flags

from jaxllm import config as config_lib
from jaxllm.config import overrides
from jaxllm.errors import Notice, RunError, UserError, nearest
from jaxllm.hardware import spec as devices

FLAGS = flags.FLAGS
_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def define_config() -> None:
    """Defines `--config FILE.py` and its `--config.a.b=value` overrides; read them with `load_config`."""
    config_flags.DEFINE_config_file(
        "config", None, "Configuration of the run: a Python file whose get_config() returns a Config."
    )


def config_file() -> str:
    """Returns the path given to `--config`."""
    return FLAGS["config"].config_filename  # type: ignore[attr-defined]


def config_overrides() -> dict[str, Any]:
    """Returns {field path: value} for the `--config.a.b=value` overrides on the command line."""
    return dict(config_flags.get_override_values(FLAGS["config"]))


def load_config() -> config_lib.Config:
    """Returns the configuration from `--config` and its overrides, with every type checked.

    Raises:
      UserError: `--config` is missing, its file cannot be read, or its `get_config()` does not return a `Config`.
    """
    config = FLAGS.config
    if config is None:
        raise UserError("no --config given; for example --config configs/quickstart.py")
    if not isinstance(config, config_lib.Config):
        path = config_file()
        try:  # the load error of the file is raised on first attribute access
            _ = config.model
        except OSError as error:
            raise UserError(f"--config {path}: file not found or not readable") from error
        raise UserError(f"--config {path}: get_config() returned {type(config).__name__}, not a jaxllm.config.Config")
    overrides.split_lists(config)
    overrides.check_types(config)
    return config


def log(*lines: str) -> None:
    """Prints lines to standard error; standard output has only results."""
    for line in lines:
        print(line, file=sys.stderr)


def keep_compiled_programs() -> None:
    """Keeps compiled programs in the user's cache folder, so that the next start of the same command is faster.

    The environment variable JAX_COMPILATION_CACHE_DIR names another folder, or is empty to keep nothing. JAX names each
    program by a hash of its HLO, the compiler's version and options, and the kind of device. That does not include the
    instruction set of a CPU, so machines that share a home folder have folders of their own.
    """
    if _CACHE_VARIABLE in os.environ:
        return
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text()
        processor = next(line for line in processor.splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        processor = f"{platform.machine()} {platform.processor()}"
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = home / "jaxllm" / "compiled" / f"{zlib.crc32(processor.encode()):08x}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))


def run(main: Callable[[], int | None], argv: Sequence[str] | None = None) -> None:
    """Parses the flags, runs `main`, and exits with the status documented at the top of this module.

    Args:
      main: the command; returns its exit status, or None for 0.
      argv: the command line with the program name first; `sys.argv` by default.
    """
    argv = list(sys.argv if argv is None else argv)
    # Libraries also log the errors that they raise; without this each error is printed twice.
    logging.set_verbosity(logging.FATAL)
    devices.set_memory_fraction()
    _show_notices()
    try:
        if {"--help", "-h", "-help"} & set(argv[1:]):
            print(_help(main))
            sys.exit(0)
        _parse(argv)
        sys.exit(main() or 0)
    except UserError as error:
        log(f"error: {error}")
        sys.exit(2)
    except RunError as error:
        log(f"error: {error}")
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show_notices() -> None:
    """Makes warnings of the category `Notice` one line on standard error."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            log(f"warning: {message}")
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show


def _parse(argv: list[str]) -> None:
    _check_override_keys(argv)
    try:
        rest = FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        raise UserError(f"unknown flag --{name}; did you mean --{nearest(name, _own_flags())}?") from error
    except flags.Error as error:
        raise UserError(_one_line(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, ImportError, NameError) as error:
        raise UserError(f"--config: {type(error).__name__}: {_one_line(error)}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; write options as --name=value")


def _check_override_keys(argv: list[str]) -> None:
    """Raises UserError for an unknown `--config.a.b`, with the nearest key, before the config file is loaded."""
    known = overrides.field_paths(config_lib.Config())
    for argument in argv[1:]:
        match = re.match(r"--?(no)?config\.([^=]+)", argument)
        if match and match[2] not in known:
            raise overrides.unknown_key(match[2])


def _one_line(error: BaseException) -> str:
    """Returns the last non-empty line of an error; the flag libraries put a traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _own_flags() -> dict[str, flags.Flag]:
    """Returns the flags that the command itself defines, without those of imported libraries."""
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
