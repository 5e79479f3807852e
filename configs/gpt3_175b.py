"""GPT-3 175B on 64 H100: ZeRO 3 over 8 hosts, tensor parallelism over the 8 GPUs of each, 3.1 M tokens a step.

Command:   python -m jaxllm.train --distributed --config configs/gpt3_175b.py --config.data.path='data/train*.bin'
           on every host (experiments/cluster/ has the scripts)
On 1,024:  add --config.mesh.data=128 --config.train.accumulate=6
Data:      token ids of GPT-2's tokenizer as uint16, flat files.
Bill:      53.30 GiB at its peak (XLA plans 53.67), 30.53 GiB between steps, of 74.51 GiB; on 1,024: XLA plans 6.17
           (python -m jaxllm.ledger --config configs/gpt3_175b.py --device h100 [--compile])
"""

from jaxllm.config import Config


def get_config() -> Config:
    config = Config()

    config.model.name = "gpt3-175b"

    config.data.source = "tokens"
    config.data.path = "data/train*.bin"
    config.data.sequence_length = 2048
    config.data.streams = 128

    # Brown et al. 2020, table 2.1 and appendix B.
    config.optimizer.peak_lr = 0.6e-4
    config.optimizer.final_lr_fraction = 0.1
    config.optimizer.warmup_steps = 120
    config.optimizer.weight_decay = 0.1

    config.precision.policy = "bf16"
    config.remat.policy = "full"
    config.mesh.data, config.mesh.tensor, config.mesh.zero = 8, 8, 3
    config.train.batch_size = 1536
    config.train.accumulate = 96
    config.train.loss_chunk = 2048
    config.train.attention_chunk = 256
    config.train.steps = 95_000
    return config
