"""Published models by name, the families they belong to, and how a configuration picks one."""

from jaxllm.architectures.registry import ARCHITECTURES, listed, resolve, resolve_config

__all__ = ["ARCHITECTURES", "listed", "resolve", "resolve_config"]
