"""Configuration file that sets nothing."""

from jaxllm.config import Config


def get_config() -> Config:
    return Config()
