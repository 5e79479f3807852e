"""Registry of published model architectures, by name, and their resolution from a configuration."""

from jaxllm.architectures.registry import ARCHITECTURES, explicit_config, resolve, resolve_config

__all__ = ["ARCHITECTURES", "explicit_config", "resolve", "resolve_config"]
