from jaxllm.config import Config


def get_config() -> Config:
    config = Config()
    model = config.model
    model.name = "llama3.2-1b"
    model.vocab_size = 257  # bytes, and one end-of-document token
    model.layers, model.width, model.heads, model.kv_heads, model.head_dim = 4, 128, 4, 2, 32
    model.mlp_width = 384
    model.context_length = 512
    model.rope_scaling = "none"
    config.data.source = "python"
    config.data.sequence_length = 256
    config.train.batch_size = 8
    config.train.steps = 600
    config.optimizer.name = "muon"
    config.optimizer.peak_lr = 5e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.01
    return config
