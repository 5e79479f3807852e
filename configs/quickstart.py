"""Trains a byte-level model on the Python standard library in two minutes on two CPU cores: the first run to try.

Command:   make quickstart    (or: python -m jaxllm.train --config configs/quickstart.py)
Expected:  2.06 bits per byte on held-out files, after 2 min 16 s (2 cores, JAX 0.10.2).
Bill:      178 MiB at its peak (XLA plans 177 with JAX 0.10; 143 and 127 with 0.12), 6.4 MiB between steps
           (python -m jaxllm.ledger --config configs/quickstart.py)
"""

from jaxllm.config import Config


def get_config() -> Config:
    config = Config()

    model = config.model  # the Llama 3 block, small enough to learn in two minutes
    model.name = "llama3.2-1b"
    model.vocab_size = 257  # 256 bytes and the end-of-document token
    model.layers, model.width = 4, 128
    model.heads, model.kv_heads, model.head_dim = 4, 2, 32
    model.mlp_width = 384
    model.context_length = 512
    model.rope_scaling = "none"
    model.unroll = 4  # a loop over layers halves the speed on a CPU; on accelerators it saves compile time

    config.data.source = "python"
    config.data.sequence_length = 256

    config.optimizer.name = "muon"
    config.optimizer.peak_lr = 2e-2
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.01

    config.train.batch_size = 8
    config.train.steps = 560
    config.checkpoint.every = 200
    config.eval.every = 200
    config.eval.batches = 16
    return config
