"""Optimizers: one record each, with the update rule, the state it keeps, and what its update needs beside that.

The configuration check, the train step, the ledger and the planner all read these records; to add an optimizer, add
one. The update rule is optax's. The state and the temporaries are written here from the papers and from compiled
programs, independently of optax, and the tests compare them with the state that optax creates and with XLA's figures.

optax is imported where a rule is built, so that reading a configuration imports no JAX.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Shape = tuple[int, ...]

# Adafactor factors the second moment over the two largest dimensions if both have at least this size (the default of
# optax.scale_by_factored_rms); an array of its state that is unused then has this shape.
FACTORED_FROM = 128
PLACEHOLDER: Shape = (1,)
# Newton-Schulz iterations of a Muon step (Jordan 2024; the default of optax.contrib.muon).
MUON_STEPS = 5


class Spec(Protocol):
    """The part of `model.specs.ParamSpec` that optimizers read."""

    @property
    def shape(self) -> Shape: ...
    @property
    def role(self) -> Any: ...
    @property
    def fan_in(self) -> tuple[int, ...]: ...
    @property
    def stacked(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Slot:
    """One optimizer slot, such as Adam's first moment.

    Attributes:
      name: Name in the bill.
      shape: Returns the shape that the slot stores for a parameter; None if it stores nothing.
    """

    name: str
    shape: Callable[[Spec], Shape | None]

    def elements(self, spec: Spec) -> int:
        shape = self.shape(spec)
        return 0 if shape is None else math.prod(shape)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One optimizer: its update rule, its state, and the temporaries of its update.

    Attributes:
      rule: Builds the direction of descent from (OptimizerConfig, tree of the trained specs), as an
        `optax.GradientTransformation` without learning rate and weight decay.
      slots: State with one array per parameter.
      counters: Shapes of the rest of the state: 32-bit counters and coefficients.
      weight_decay: Whether decoupled weight decay is added to the direction.
      array_statistics: Whether the update of an element needs means over its whole array, as in Adafactor.
      orthogonalizes: Whether matrices are orthogonalized by Newton-Schulz steps, as in Muon.
      rereads_moment: Whether the direction reads the old moment after the new one is computed, as in Lion. XLA then
        keeps a copy of the old one on a CPU.
      directions: Platform -> float32 directions of the largest array that are alive at a time in the update (fitted to
        XLA's buffer assignment). Elementwise rules are fused into the weight update and need none.
      small_state: Whether the planner proposes it in place of Adam when the state does not fit.
    """

    rule: Callable[[Any, Any], Any]
    slots: tuple[Slot, ...] = ()
    counters: tuple[Shape, ...] = ()
    weight_decay: bool = True
    array_statistics: bool = False
    orthogonalizes: bool = False
    rereads_moment: bool = False
    directions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    small_state: bool = False

    @property
    def elementwise(self) -> bool:
        """True if each element is updated by itself: then state may be padded, and offloaded to host memory."""
        return not (self.array_statistics or self.orthogonalizes)

    @property
    def counter_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.counters)


def _sgd(config: Any, specs: Any) -> Any:
    import optax

    return optax.identity()


def _momentum(config: Any, specs: Any) -> Any:
    import optax

    return optax.trace(decay=config.b1)


def _adam(config: Any, specs: Any) -> Any:
    import optax

    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _adafactor(config: Any, specs: Any) -> Any:
    import optax

    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())


def _lion(config: Any, specs: Any) -> Any:
    import optax

    return optax.scale_by_lion(config.b1, config.b2)


def _muon(config: Any, specs: Any) -> Any:
    import jax
    import optax.contrib

    def dimensions(spec: Spec) -> Any:
        if spec.role != "matrix":
            return None
        outputs = tuple(i for i in range(len(spec.shape)) if i not in (*spec.fan_in, *spec.stacked))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=spec.fan_in, output_axis=outputs)

    return optax.contrib.muon(
        learning_rate=-1.0,  # optax multiplies by −learning_rate; −1 gives the plain direction
        beta=config.b1,
        adam_b1=config.b1,
        adam_b2=config.b2,
        eps=config.eps,
        ns_steps=MUON_STEPS,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree.map(dimensions, specs, is_leaf=lambda node: hasattr(node, "role")),
    )


def _same(spec: Spec) -> Shape:
    return spec.shape


def _of_matrices(spec: Spec) -> Shape | None:
    return spec.shape if spec.role == "matrix" else None


def _of_others(spec: Spec) -> Shape | None:
    return None if spec.role == "matrix" else spec.shape


def _factored(spec: Spec) -> tuple[Shape, Shape, Shape]:
    """Returns the shapes of Adafactor's second moment of one array: (row, column, unfactored)."""
    order = sorted(range(len(spec.shape)), key=lambda dim: spec.shape[dim])
    if len(order) < 2 or spec.shape[order[-2]] < FACTORED_FROM:
        return PLACEHOLDER, PLACEHOLDER, spec.shape

    def without(dim: int) -> Shape:
        return spec.shape[:dim] + spec.shape[dim + 1 :]

    return without(order[-1]), without(order[-2]), PLACEHOLDER


_ADAM_SLOTS = (Slot("m, first moment", _same), Slot("v, second moment", _same))

# In the order of messages. The planner proposes those with small state from the last to the first.
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(_sgd, small_state=True),
    "momentum": Optimizer(_momentum, (Slot("momentum", _same),), small_state=True),
    # Kingma & Ba 2015.
    "adam": Optimizer(_adam, _ADAM_SLOTS, ((),), weight_decay=False),
    # Adam with decoupled weight decay: Loshchilov & Hutter 2019.
    "adamw": Optimizer(_adam, _ADAM_SLOTS, ((),)),
    # Shazeer & Stern 2018; the update is relative to each array's RMS.
    "adafactor": Optimizer(
        _adafactor,
        (
            Slot("v, by row", lambda spec: _factored(spec)[0]),
            Slot("v, by column", lambda spec: _factored(spec)[1]),
            Slot("v, not factored", lambda spec: _factored(spec)[2]),
        ),
        ((),),
        array_statistics=True,
        directions={"cpu": 1, "gpu": 1, "tpu": 2},
        small_state=True,
    ),
    # Chen et al. 2023.
    "lion": Optimizer(
        _lion,
        (Slot("m, first moment", _same),),
        ((),),
        rereads_moment=True,
        directions={"gpu": 1, "tpu": 1},
        small_state=True,
    ),
    # Jordan 2024, scaled to Adam's RMS as in Liu et al. 2025, on the matrices of blocks; Nesterov Adam elsewhere. The
    # state has a counter for each of the two rules, and three coefficients of the polynomial.
    "muon": Optimizer(
        _muon,
        (
            Slot("momentum of matrices", _of_matrices),
            Slot("m of other parameters", _of_others),
            Slot("v of other parameters", _of_others),
        ),
        ((), (), (3,)),
        orthogonalizes=True,
        directions={"tpu": 1},
    ),
}
