"""Writes one token of each row into a stacked cache on a TPU, in place.

A scatter or an update of slices would do, but XLA lays the cache out for those, and not for the kernel that reads it:
it then copies the whole cache in each layer. Here the slots around the new one are read, changed and written back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxllm.kernels import decode_tpu

_SUBLANES = 32  # a tile's rows, for numbers of one byte; of wider ones it has fewer


def write_token(
    stack_k: Float[Array, "L B K S H"],
    stack_v: Float[Array, "L B K S H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    layer: Int[Array, ""],
    slot: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "L B K S H"], Float[Array, "L B K S H"]]:
    """The stacks, in the same memory, with each row's token in its slot of one layer; slot S writes nothing."""
    B, K, S, H = stack_k.shape[1:]
    slots_last = decode_tpu.slots_last(H)
    width = min(decode_tpu.LANES if slots_last else _SUBLANES, S)
    if slots_last:
        stack_k, stack_v = stack_k.swapaxes(3, 4), stack_v.swapaxes(3, 4)
    new_shape = (B, K, H, 1) if slots_last else (B, K, 1, H)

    def around(b: Any, slot_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
        at = jax.lax.div(jnp.minimum(slot_ref[b], S - 1), width)
        return (layer_ref[0], b, 0, 0, at) if slots_last else (layer_ref[0], b, 0, at, 0)

    tile = pl.BlockSpec((None, None, K, *((H, width) if slots_last else (width, H))), around)
    token = pl.BlockSpec((None, *new_shape[1:]), lambda b, *_: (b, 0, 0, 0))
    moved = 4 * B * K * width * H * stack_k.dtype.itemsize
    out_k, out_v = pl.pallas_call(
        functools.partial(_kernel, slots=S, width=width, slot_dim=2 if slots_last else 1),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(B,), in_specs=[token, token, tile, tile], out_specs=[tile, tile]
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (stack_k, stack_v)],
        input_output_aliases={4: 0, 5: 1},  # counted with the two scalar arguments
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="decode_write",
    )(slot, layer[None], *(x.astype(stack_k.dtype).reshape(new_shape) for x in (k, v)), stack_k, stack_v)
    return (out_k.swapaxes(3, 4), out_v.swapaxes(3, 4)) if slots_last else (out_k, out_v)


def _kernel(
    slot_ref: Any,
    layer_ref: Any,
    k_ref: Any,
    v_ref: Any,
    old_k_ref: Any,
    old_v_ref: Any,
    out_k_ref: Any,
    out_v_ref: Any,
    *,
    slots: int,
    width: int,
    slot_dim: int,
) -> None:
    del layer_ref  # read by the index maps
    slot = slot_ref[pl.program_id(0)]
    begin = jax.lax.div(jnp.minimum(slot, slots - 1), width) * width
    for new_ref, old_ref, out_ref in ((k_ref, old_k_ref, out_k_ref), (v_ref, old_v_ref, out_v_ref)):
        here = begin + jax.lax.broadcasted_iota(jnp.int32, old_ref.shape, slot_dim) == slot
        out_ref[...] = jnp.where(here, new_ref[...], old_ref[...])
