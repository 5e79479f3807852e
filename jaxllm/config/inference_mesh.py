"""Mesh of inference: the number of devices, and one device's shard of a model as an architecture."""

import dataclasses
import difflib

from jaxllm.config.schema import Architecture, MeshConfig
from jaxllm.errors import UserError

_AXES = ("data", "tensor")


@dataclasses.dataclass(frozen=True)
class InferenceMesh:
    """Number of devices along each mesh axis at inference.

    Query heads, key/value heads, MLP and vocabulary are sharded over `tensor`, and so is the KV cache. Where devices
    outnumber key/value heads, each head is stored on several devices. Sequences are sharded over `data`, and every
    group of `tensor` devices has all weights.

    Attributes:
      data: Devices that sequences are sharded over.
      tensor: Devices that weights and cache are sharded over.
    """

    data: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in dataclasses.asdict(self).items() if size > 1]
        return ",".join(sizes) or "tensor=1"

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.data * self.tensor

    @property
    def config(self) -> MeshConfig:
        """The mesh as a `MeshConfig`."""
        return MeshConfig(data=self.data, tensor=self.tensor)

    def stored_model(self, model: Architecture) -> Architecture:
        """Returns the architecture of all devices' arrays together: key/value heads repeated, vocabulary padded.

        Args:
          model: Architecture of the model.

        Raises:
          UserError: The model cannot be sharded; the message names the dimension and the sizes that work.
        """
        self._check(model)
        vocab_size = model.vocab_size + -model.vocab_size % self.tensor
        return dataclasses.replace(model, kv_heads=max(model.kv_heads, self.tensor), vocab_size=vocab_size)

    def shard(self, model: Architecture) -> Architecture:
        """Returns the architecture whose arrays have the shapes of one device's shards.

        Raises:
          UserError: The model cannot be sharded; the message names the dimension and the sizes that work.
        """
        stored = self.stored_model(model)
        sizes = {
            name: getattr(stored, name) // self.tensor for name in ("heads", "kv_heads", "mlp_width", "vocab_size")
        }
        return dataclasses.replace(stored, **sizes)

    def rows(self, batch: int) -> int:
        """Returns the number of sequences on one device if `batch` sequences are decoded, padding rows included."""
        return -(-batch // self.data)

    def supports(self, model: Architecture) -> bool:
        """Returns whether the model can be sharded over this mesh."""
        return not self._obstacles(model)

    def _obstacles(self, model: Architecture) -> list[str]:
        wrong = [
            f"{name} ({size})"
            for name, size in (("heads", model.heads), ("mlp_width", model.mlp_width))
            if size % self.tensor
        ]
        if max(model.kv_heads, self.tensor) % min(model.kv_heads, self.tensor):
            wrong.append(f"kv_heads ({model.kv_heads})")
        return wrong

    def _check(self, model: Architecture) -> None:
        wrong = self._obstacles(model)
        if wrong:
            sizes = [n for n in range(1, model.heads + 1) if InferenceMesh(tensor=n).supports(model)]
            raise UserError(
                f"--mesh tensor={self.tensor}: the model's {' and '.join(wrong)} cannot be sharded over {self.tensor} "
                f"devices; sizes that work: {', '.join(map(str, sizes))}"
            )


ONE_DEVICE = InferenceMesh()


def parse(text: str) -> InferenceMesh:
    """Parses the value of `--mesh`: "tensor=4", or "data=2,tensor=4".

    Raises:
      UserError: An axis is unknown or given twice, or a size is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in _AXES:
            near = difflib.get_close_matches(axis, _AXES, n=1)
            hint = f"did you mean {near[0]}?" if near else "axes are data and tensor."
            raise UserError(f"--mesh is {text!r}: {axis!r} is not an axis; {hint} Example: --mesh=data=2,tensor=4")
        if axis in sizes:
            raise UserError(f"--mesh is {text!r}: {axis} is given twice; give each axis once")
        if not (size.isascii() and size.isdigit() and int(size) > 0):
            raise UserError(f"--mesh is {text!r}: {axis} must be a positive number of devices, as in --mesh={axis}=2")
        sizes[axis] = int(size)
    return InferenceMesh(**sizes)
