"""Training steps of small models on random batches, without data files or a loop, for the tests of train/."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.parallel import mesh
from jaxllm.step.placement import make_layout
from jaxllm.step.train_step import train_step


def config(**fields) -> Config:
    """Returns a configuration: 8 sequences of 16 tokens, AdamW, float32, 20 steps; `fields`: `section_field=value`."""
    made = Config()
    made.train.batch_size, made.data.sequence_length, made.train.steps = 8, 16, 20
    made.optimizer.name, made.optimizer.weight_decay, made.optimizer.peak_lr = "adamw", 0.1, 1e-2
    made.precision.policy = "fp32"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        assert hasattr(getattr(made, section), field), name
        setattr(getattr(made, section), field, value)
    return made


def batch(config: Config, model: Architecture, seed: int) -> dict[str, np.ndarray]:
    """Returns a batch with two packed documents per row; in the first row, padding truncates one of them."""
    rows, length = config.train.batch_size, config.data.sequence_length
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, (rows, length + 1)).astype(np.int32)
    column = np.arange(length)
    segments = np.where(column < length // 2, 1, 2)[None].repeat(rows, 0).astype(np.int32)
    segments[0, -3:] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments,
        "positions": np.tile(column % (length // 2), (rows, 1)).astype(np.int32),
        "weights": (segments > 0).astype(np.float32),
    }


# State initializers: compiled once for runs of the same kind.
_STARTS: dict[tuple[str, Architecture], Any] = {}


@dataclasses.dataclass
class Run:
    """Train step and its state on a mesh."""

    config: Config
    model: Architecture = models.ROTARY

    def __post_init__(self) -> None:
        self.mesh = mesh.make_mesh(self.config.mesh)
        self.step_spec = programs.make_step_spec(self.config, self.model, "cpu")
        self.layout = make_layout(self.config, self.model, self.step_spec.policy, self.mesh)
        alike = (repr(self.config), self.model)
        if alike not in _STARTS:
            _STARTS[alike] = programs.init_state(self.config, self.step_spec, self.mesh).jitted
        self.state = _STARTS[alike]()
        self._step: Any = None
        self._updates: dict[str, Any] = {}

    def step(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Updates the run's state once and returns the metrics."""
        if self._step is None:
            self._step = programs.train_step(self.config, self.step_spec, self.mesh).compile()
        placed = jax.device_put(values, mesh.batch_sharding(self.mesh))
        self.state, metrics = self._step(self.state, placed)
        return {name: float(value) for name, value in metrics.items()}

    def losses(self, steps: int) -> list[float]:
        return [self.step(batch(self.config, self.model, i))["loss"] for i in range(steps)]

    def updated(self, values: dict[str, np.ndarray], **step_spec) -> tuple[Any, dict[str, jax.Array]]:
        """Returns (parameters, metrics) after one update, leaving the run's state unchanged."""
        key = repr(step_spec)
        if key not in self._updates:
            changed = dataclasses.replace(self.step_spec, **step_spec)
            self._updates[key] = jax.jit(lambda s, b: train_step(s, b, changed, self.layout))
        new, metrics = self._updates[key](self.state, values)
        return new.params, metrics


def leaf_names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def assert_close(a: Any, b: Any, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol), a, b)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def copy(tree: Any) -> Any:
    """Copies a state, so that it survives a step that donates the original."""
    return jax.tree.map(jnp.copy, tree)
