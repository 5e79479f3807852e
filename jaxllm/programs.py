"""The programs of this system: what is jitted, over which inputs, with which buffers donated.

The only home of `jax.jit`. The trainer and the decoder run these objects; the ledger compiles the same
ones. What is checked is what runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the abstract values of all its arguments.

    Attributes:
      name: for messages.
      jitted: the result of `jax.jit`.
      inputs: `jax.ShapeDtypeStruct` trees, one an argument, with shardings where there is a mesh.
      donated: positions of the arguments whose buffers the program takes over.
    """

    name: str
    jitted: Callable[..., Any]
    inputs: tuple[Any, ...]
    donated: tuple[int, ...]

    def compile(self) -> jax.stages.Compiled:
        """The executable for these inputs and no others: calling it can never compile again."""
        return self.jitted.lower(*self.inputs).compile()  # type: ignore[attr-defined]
