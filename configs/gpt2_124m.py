"""Trains GPT-2 124M on one GPU with the recipe of its paper and nanoGPT: 0.5 M tokens per step.

Command:   python -m jaxllm.train --config configs/gpt2_124m.py --config.data.path='data/train*.bin'
Data:      token ids as uint16, for instance the output of nanoGPT's prepare.py for OpenWebText.
Bill:      8.06 GiB at its peak (XLA plans 8.03), 1.39 GiB between steps, of 75.15 GiB
           (python -m jaxllm.ledger --config configs/gpt2_124m.py --device h100 [--compile])
Plan:      python -m jaxllm.plan --config configs/gpt2_124m.py --task train --device h100
           This file keeps the obvious choice, 16 sequences per micro-batch and no recomputation: 0.438 s per step by
           roofline (compute). The planner's first has 128 per micro-batch: 36 GiB more, and no gain. Attention without
           kernels, which stores its scores in memory, would take 1.21 s (memory bandwidth).
"""

from jaxllm.config import Config


def get_config() -> Config:
    config = Config()

    config.model.name = "gpt2"

    config.data.source = "tokens"
    config.data.path = "data/train*.bin"
    config.data.sequence_length = 1024

    config.optimizer.peak_lr = 6e-4
    config.optimizer.final_lr_fraction = 0.1
    config.optimizer.warmup_steps = 2000
    config.optimizer.weight_decay = 0.1

    config.precision.policy = "bf16"
    config.train.batch_size = 512
    config.train.accumulate = 32
    config.train.steps = 300_000
    return config
