"""Loads a model in a separate process and prints its memory use; `test_loading_memory` runs it.

python memory_child.py MODEL DTYPE WAY [FAULT]: WAY is "load", "sharded" (8 devices, ZeRO stage 3) or "lora". It prints
one JSON object: bytes of the result and of its largest array, number of elements of the largest tensor, and the peak
growth of the process's anonymous memory in bytes (Linux's RssAnon, which excludes pages of mapped files).
"""

import ctypes
import gc
import json
import pathlib
import sys
import tempfile
import threading
import time

import jax
import numpy as np

from jaxllm import architectures, programs
from jaxllm.checkpoints import open_any
from jaxllm.config import Config, MeshConfig
from jaxllm.interop import opening, rules
from jaxllm.model import specs
from jaxllm.parallel import mesh


def own_memory() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Peak:
    """Context manager that measures the peak growth of the process's memory in bytes, sampled every millisecond."""

    def __enter__(self):
        self._before, self.bytes, self._done = own_memory(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.bytes = max(self.bytes, own_memory() - self._before)
            time.sleep(0.001)

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, own_memory() - self._before)


def plant(fault: str) -> None:
    kept, init = [], rules._LayerBuilder.__init__

    def keeps(self, made, read):
        def copied(name):
            kept.append(np.array(read(name)))
            return kept[-1]

        init(self, made, copied)

    assert fault == "keeps"
    rules._LayerBuilder.__init__ = keeps


def main(model: str, dtype: str, way: str, fault: str = "") -> None:
    sys.setswitchinterval(0.0005)
    if fault:
        plant(fault)
    opened = opening.open_model(model)
    if way in ("load", "sharded"):
        shardings = None
        if way == "sharded":
            sizes = MeshConfig(data=8, zero=3)
            over = mesh.make_mesh(sizes)
            placed = mesh.placements(specs.param_specs(opened.model), sizes, "weights", False)
            shardings = jax.tree.map(lambda spec: mesh.named_sharding(over, spec), placed)

        def work():
            return opened.load(dtype, shardings)
    else:
        config = Config()
        config.init_from, config.precision.policy = model, dtype
        config.data.path = "none is read"
        config.data.source, config.data.sequence_length, config.optimizer.name = "tokens", 32, "sgd"
        config.lora.rank = 2 if way == "lora" else 0
        if jax.device_count() > 1:
            config.mesh.data, config.mesh.zero = jax.device_count(), 3
            config.train.batch_size = 8
        made = open_any.prepare(config, pathlib.Path(tempfile.gettempdir()) / "no such run").config
        over = mesh.make_mesh(made.mesh)
        step_spec = programs.make_step_spec(made, architectures.resolve_config(made), "cpu")

        def work():
            return programs.state_from(made, step_spec, over, opened.load)

    if way == "lora":
        # Warm up first: the compiler keeps the memory that it allocates.
        jax.block_until_ready(work())
        gc.collect()
    jax.block_until_ready(jax.device_put(np.zeros(64, np.float32), jax.devices()[-1]))
    # Return freed heap pages to the system first: allocations that reuse them would not be counted.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with Peak() as peak:
        result = jax.block_until_ready(work())
    leaves = jax.tree.leaves(result)
    layers = opened.model.layers
    print(
        json.dumps(
            {
                "final": sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards),
                "array": max(x.nbytes for x in leaves),
                "tensor": max(x.size // (layers if x.ndim > 2 else 1) for x in leaves),
                "peak": peak.bytes,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
