"""GPT-2 124M on one GPU, as its paper and nanoGPT train it: 0.5 M tokens a step.

Command:   python -m jaxllm.train --config configs/gpt2_124m.py --config.data.path='data/train*.bin'
Data:      token ids as uint16, for instance those that nanoGPT's prepare.py writes of OpenWebText.
Bill:      14.07 GiB at its peak (XLA plans 13.09), 1.39 GiB between steps, of 74.51 GiB
           (python -m jaxllm.ledger --config configs/gpt2_124m.py --device h100 [--compile])
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
    config.train.accumulate = 16
    config.train.attention_chunk = 256  # scores of all queries would take 1.5 GiB a layer
    config.train.steps = 300_000
    return config
