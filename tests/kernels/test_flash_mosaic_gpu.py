"""The Hopper kernel in JAX's simulation of threads, copies and barriers, including race detection.

The simulation has no register matmuls (WGMMA), so plain JAX replaces them; `tests/aot` compiles the real ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # has no public name
from test_flash_attention import LIMIT, draw, errors, exact, seen

from jaxllm.errors import UserError
from jaxllm.kernels.flash import mosaic_gpu as flash_mosaic_gpu
from jaxllm.kernels.flash import triton as flash_triton
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.kernels.flash.common import AttentionSpec, Inputs, Tile, Tiles

SMALL = Tile(128, 64, 8, 2)
TILES = Tiles(SMALL, Tile(64, 64), Tile(64, 64))
# (queries, keys), head_dim, heads per group, window, softcap, segments, causal, dtype. There are up to five tiles of
# keys, more than there are buffers.
CELLS = [
    ((128, 128), 64, 1, 0, 0.0, False, True, "bfloat16"),
    ((128, 320), 64, 2, 0, 20.0, True, True, "bfloat16"),
    ((200, 330), 64, 1, 70, 20.0, True, True, "float16"),
    ((300, 200), 64, 1, 0, 0.0, False, True, "bfloat16"),
    ((129, 129), 192, 1, 40, 0.0, False, False, "float16"),
    ((1, 77), 256, 2, 0, 0.0, True, False, "bfloat16"),
]


def run(cell, tiles=TILES):
    """Returns (output, expected output) of one row and one key head; masks are as in `test_flash_attention`."""
    lengths, head_dim, group, window, softcap, segmented, causal, dtype = cell
    arrays, q_segments, k_segments = draw(lengths, head_dim, group, segmented, dtype)
    q, k, v, d_out = (x[:1] for x in arrays)
    q_segments, k_segments = q_segments[:1], k_segments[:1]
    scores = {"scale": head_dim**-0.5, "softcap": softcap}
    segments = (q_segments, k_segments) if segmented else ()
    options = {"platform": "gpu", "backend": "mosaic_gpu", "tiles": tiles, "interpret": True}
    got = flash_attention(q, k, v, *segments, causal=causal, window=window, **scores, **options)
    want = exact(q, k, v, d_out, seen(*lengths, causal, window, q_segments, k_segments), **scores)[0]
    assert got.dtype == dtype
    return np.asarray(got, np.float64), want


def error(cell, tiles=TILES):
    got, want = run(cell, tiles)
    return np.abs(got - want).max() / max(1, np.abs(want).max())


@pytest.mark.parametrize(
    "cell",
    [CELLS[0], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[1:])],
    ids=lambda cell: "-".join(map(str, cell)).replace(" ", ""),
)
def test_output(cell):
    assert error(cell) <= LIMIT[cell[-1]]


@pytest.mark.slow
def test_three_groups_multiply_as_two_do():
    tile = Tile(192, 64, 12, 3)
    assert error(CELLS[2], Tiles(tile, tile, tile)) <= LIMIT["float16"]


@pytest.mark.slow
def test_gradients_are_those_of_the_triton_kernels_with_its_statistics():
    cell = ("gpu", (96, 130), 64, 1, 0, 20.0, True, True)
    found = errors(cell, "bfloat16", backend="mosaic_gpu", tiles=TILES)
    assert max(found) <= LIMIT["bfloat16"], found


@pytest.mark.slow
def test_log_sums_are_the_triton_kernel_s():
    (q, k, v, _), _, _ = draw((130, 100), 64, 1, False, "float16")
    spec = AttentionSpec(130, 100, True, 0, 0.125, 0.0)
    inputs = Inputs(q[:1], k[:1], v[:1])
    _, got = flash_mosaic_gpu.forward(inputs, spec, TILES, True)
    _, want = jax.jit(lambda inputs: flash_triton.forward(inputs, spec, TILES, True))(inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_queries_that_see_nothing_give_exactly_nothing():
    """The first block of queries precedes the first key, so it has no tiles and its output is exactly zero."""
    got, want = run(((192, 40), 64, 1, 0, 0.0, False, True, "bfloat16"))
    assert np.isfinite(got).all()
    assert not got[:, :152].any()
    assert np.abs(got[:, 152:] - want[:, 152:]).max() <= LIMIT["bfloat16"]


def test_a_wrong_output_would_be_seen(monkeypatch):
    monkeypatch.setattr(flash_mosaic_gpu, "MASK_VALUE", 0.0)
    assert error(CELLS[0]) > LIMIT["bfloat16"]


def forget_to_wait(monkeypatch, name):
    """Disables all waits for the barriers of one name."""
    forgotten = []
    block, wait = flash_mosaic_gpu._block, flash_mosaic_gpu.plgpu.barrier_wait

    def noted(refs, scratch, **rest):
        forgotten.append(getattr(scratch, name))
        return block(refs, scratch, **rest)

    def some(barrier):
        if all(getattr(barrier, "ref", barrier) is not other for other in forgotten):
            wait(barrier)

    monkeypatch.setattr(flash_mosaic_gpu, "_block", noted)
    monkeypatch.setattr(flash_mosaic_gpu.plgpu, "barrier_wait", some)


# The older simulation waits forever for a thread that has failed.
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.10 hangs where it finds a race")
@pytest.mark.parametrize("name", ["q_ready", "k_ready", "v_ready", "k_free", "v_free"])
def test_a_barrier_without_a_waiter_is_caught(name, monkeypatch):
    forget_to_wait(monkeypatch, name)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED|Barrier"):
            run(CELLS[1])
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"head_dim": 80}, "takes head_dim 64, 128, 192, 256 in bfloat16 or float16, not 80 in bfloat16"),
        ({"dtype": "float32"}, "not 64 in float32; use backend='triton'"),
        ({"tiles": Tiles(Tile(64, 64, 4), SMALL, SMALL)}, "tiles of 64 queries for each 4 warps, 8 or 12"),
        ({"backend": "cuda"}, "attention on gpu has the backends triton, mosaic_gpu, not 'cuda'"),
        ({"platform": "tpu"}, "attention on tpu has the backends mosaic, not 'mosaic_gpu'"),
    ],
)
def test_what_it_cannot_do_is_refused(asked, message):
    asked = {"head_dim": 64, "dtype": "bfloat16", "backend": "mosaic_gpu", "platform": "gpu"} | asked
    head_dim, dtype = asked.pop("head_dim"), asked.pop("dtype")
    q, k = jnp.zeros((1, 8, 2, head_dim), dtype), jnp.zeros((1, 2, 8, head_dim), dtype)
    with pytest.raises(UserError, match=message):
        flash_attention(q, k, k, causal=True, window=0, scale=1.0, softcap=0.0, **asked)
