"""Training runs of about a second, for the tests of everything around the step."""

import io
import os
import pathlib
import subprocess
import sys
from typing import Any

import compiler
import jax.numpy as jnp
import numpy as np
import starter
from rich.console import Console

from jaxllm.checkpoints import checkpoint, open_any
from jaxllm.config import Config
from jaxllm.train.trainer import Trainer

ROOT = pathlib.Path(__file__).parent.parent


def write_corpus(folder: pathlib.Path, files: int = 12) -> str:
    """Writes text files of seeded random words and returns their glob."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    for i in range(files):
        text = " ".join(generator.choice(words, size=120))
        (folder / f"{i}.txt").write_text(text + "\n")
    return str(folder / "*.txt")


def tiny_config(path: str, **fields) -> Config:
    """Returns a configuration with one layer of width 16 on `write_corpus`; `fields` are `section_field=value`."""
    config = Config()
    model = config.model
    model.name = "llama3.2-1b"
    model.vocab_size, model.layers, model.width, model.heads, model.kv_heads, model.head_dim = 257, 1, 16, 2, 1, 8
    model.mlp_width, model.context_length, model.rope_scaling = 32, 64, "none"
    config.data.source, config.data.path, config.data.sequence_length = "text", path, 32
    config.data.shuffle_window, config.data.validation_fraction = 8, 0.2
    config.train.steps, config.train.batch_size = 8, 4
    config.optimizer.peak_lr = 1e-2
    config.checkpoint.every, config.eval.every, config.eval.batches = 3, 0, 2
    for name, value in fields.items():
        section, field = name.split("_", 1)
        assert hasattr(getattr(config, section), field), name
        setattr(getattr(config, section), field, value)
    return config


def train(config: Config, workdir: pathlib.Path) -> tuple[int, str]:
    """Trains in this process and returns (exit status, everything printed)."""
    out = io.StringIO()
    status = Trainer(config, pathlib.Path(os.path.relpath(workdir)), Console(file=out, width=100)).run()
    return status, out.getvalue()


def trained(workdir: str | os.PathLike[str]) -> tuple[Config, Any]:
    """Returns (configuration, float32 parameters) of a run's newest complete checkpoint, opened as for sampling."""
    opened = open_any.open_workdir(pathlib.Path(workdir))
    return checkpoint.newest(workdir)[1], opened.load(jnp.float32)


def environment(**extra: str) -> dict[str, str]:
    """Returns a user's environment with one CPU device and the defaults that the tests tighten."""
    usual = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": compiler.FAST, "JAX_NUMPY_RANK_PROMOTION": "allow"}
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": ""} | usual | extra  # nothing is kept in the user's folder


def compiled_once(cache: pathlib.Path) -> dict[str, str]:
    """Returns extra environment variables with which commands share compiled programs through the folder `cache`."""
    least = {f"JAX_PERSISTENT_CACHE_MIN_{of}": "0" for of in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
    return {"JAX_COMPILATION_CACHE_DIR": str(cache), **least}


def started(arguments: list[str], **extra: str) -> starter.Started:
    """Starts `python <arguments>` (`-m module …` or `-c code …`) in the background, with more in its environment."""
    return starter.start(arguments, environment(**extra), ROOT)


def command(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a command as a user would."""
    return _run(["-m", module, *arguments])


def python(code: str) -> subprocess.CompletedProcess:
    """Runs code in a process that has already imported the libraries."""
    return _run(["-c", code])


def fresh_python(code: str) -> subprocess.CompletedProcess:
    """Runs code in a new interpreter with pipes, for tests of imports or file sizes."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )


def _run(arguments: list[str]) -> subprocess.CompletedProcess:
    process = started(arguments)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
