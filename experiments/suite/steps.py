"""Training run on random tokens: its configuration, compiled train step, state and batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import architectures, programs
from jaxllm.config import Architecture, Config
from jaxllm.parallel.mesh import make_mesh

# Replaces a published model on a CPU.
TINY = {"vocab_size": 128, "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_width": 64}


def configured(model: str, length: int, batch: int, remat: str, tiny: bool, attention: str = "auto") -> Config:
    """Returns a one-device configuration with AdamW and the platform's default precision; `auto` attention if tiny."""
    config = Config()
    config.model.name = "llama3.2-1b" if tiny else model
    config.data.sequence_length, config.train.batch_size = (32, 2) if tiny else (length, batch)
    config.optimizer.name, config.remat.policy = "adamw", remat
    if tiny:
        for name, value in TINY.items():
            setattr(config.model, name, value)
        config.model.context_length, config.model.rope_scaling = 128, "none"
    config.attention.implementation = "auto" if tiny else attention
    return config


class Run:
    """Compiled train step with its state and one batch on the device."""

    def __init__(self, config: Config, model: Architecture | None = None):
        self.config, self.model = config, model or architectures.resolve_config(config)
        platform, self._mesh = jax.default_backend(), make_mesh(config.mesh)
        self._step_spec = programs.make_step_spec(config, self.model, platform)
        self.step = programs.train_step(config, self._step_spec, self._mesh)
        self.compiled = self.step.compile()
        self._state: Any = None
        self._batch: Any = None

    def initialize(self) -> None:
        """Creates the state and the batch on the device."""
        self._state = programs.init_state(self.config, self._step_spec, self._mesh).jitted()
        B, T = self.config.train.batch_size, self.config.data.sequence_length
        tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, self.model.vocab_size, jnp.int32)
        fields = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": jnp.ones((B, T), jnp.int32),
            "positions": jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
            "weights": jnp.ones((B, T), jnp.float32),
        }
        placed = self.step.inputs[1]
        self._batch = {name: jax.device_put(fields[name], placed[name].sharding) for name in placed}
        jax.block_until_ready((self._state, self._batch))

    def step_once(self) -> Any:
        """Runs one step and returns its metrics."""
        self._state, metrics = self.compiled(self._state, self._batch)
        return metrics

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.config.train.batch_size * self.config.data.sequence_length
