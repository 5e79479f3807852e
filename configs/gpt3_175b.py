"""Trains GPT-3 175B on 64 H100: ZeRO 3, activations offloaded to host memory, 3.1 M tokens per step.

Command:   python -m jaxllm.train --distributed --config configs/gpt3_175b.py --config.data.path='data/train*.bin'
           on every host (scripts: experiments/cluster/)
On 1,024:  add --config.mesh.data=512 --config.mesh.tensor=2 --config.train.accumulate=1
Data:      token ids of GPT-2's tokenizer as uint16, flat files.
Bill:      70.87 GiB at its peak (XLA plans 67.78), 30.49 GiB between steps, of 75.15 GiB; on 1,024: XLA plans 15.86;
           and 81 GiB of host memory per GPU
           (python -m jaxllm.ledger --config configs/gpt3_175b.py --device h100 [--compile])
Plan:      python -m jaxllm.plan --config configs/gpt3_175b.py --task train --device h100 --count 64
           This file has the planner's first: 53.1 s per step by roofline (compute). The obvious choice recomputes what
           is offloaded here and takes 64.9 s: --config.remat.policy=full, for hosts without 650 GiB to spare. XLA
           overlaps each copy with other work of its layer. If 12 of the 33 s of copying were exposed, the gain would
           be lost.
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
    config.remat.policy = "offload:attn_qkv,attn_context,attn_lse,resid_mid,mlp_up,mlp_gate"
    config.mesh.data, config.mesh.zero = 64, 3
    config.train.batch_size = 1536
    config.train.accumulate = 12
    config.train.steps = 95_000
    return config
