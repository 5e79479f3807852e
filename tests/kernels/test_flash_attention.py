"""Flash attention kernels in interpret mode, compared with float64 attention computed by its definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxllm.errors import UserError
from jaxllm.kernels import reference
from jaxllm.kernels.flash import common as flash_common
from jaxllm.kernels.flash import tpu as flash_tpu
from jaxllm.kernels.flash import triton as flash_triton
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.kernels.flash.common import AttentionSpec, Tile, Tiles, blocks_of

LIMIT = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
KEY_HEADS = 2

# platform, (queries, keys), head_dim, heads per group, window, softcap, segments, causal. Every pair of values is met
# on each platform, except some of lengths with head_dim.
CELLS = [
    ("gpu", (1, 127), 64, 2, 0, 0.0, True, False),
    ("gpu", (1, 127), 64, 4, 64, 20.0, True, False),
    ("gpu", (1, 127), 80, 1, 5, 0.0, False, True),
    ("gpu", (1, 129), 128, 1, 5, 20.0, False, False),
    ("gpu", (1, 129), 128, 2, 64, 20.0, True, True),
    ("gpu", (1, 129), 192, 4, 0, 0.0, True, True),
    ("gpu", (33, 100), 16, 1, 0, 20.0, False, False),
    ("gpu", (33, 100), 16, 4, 64, 0.0, True, True),
    ("gpu", (33, 100), 80, 2, 5, 20.0, True, False),
    ("gpu", (64, 64), 64, 1, 0, 20.0, True, True),
    ("gpu", (64, 64), 256, 2, 64, 0.0, False, False),
    ("gpu", (64, 64), 256, 4, 5, 20.0, False, False),
    ("gpu", (100, 33), 64, 4, 5, 0.0, False, False),
    ("gpu", (100, 33), 192, 1, 64, 20.0, False, False),
    ("gpu", (100, 33), 256, 2, 0, 20.0, True, True),
    ("gpu", (129, 129), 80, 4, 0, 0.0, False, False),
    ("gpu", (129, 129), 192, 2, 5, 20.0, True, True),
    ("gpu", (129, 129), 256, 1, 64, 0.0, True, True),
    ("gpu", (192, 192), 16, 2, 5, 20.0, False, False),
    ("gpu", (192, 192), 80, 1, 64, 20.0, True, True),
    ("gpu", (192, 192), 128, 4, 0, 0.0, False, False),
    ("tpu", (1, 1), 64, 2, 0, 0.0, True, False),
    ("tpu", (1, 1), 64, 4, 64, 20.0, True, False),
    ("tpu", (1, 1), 80, 1, 5, 0.0, False, True),
    ("tpu", (1, 129), 128, 1, 5, 20.0, False, False),
    ("tpu", (1, 129), 128, 2, 64, 20.0, True, True),
    ("tpu", (1, 129), 128, 4, 0, 0.0, True, True),
    ("tpu", (17, 17), 64, 1, 0, 20.0, True, True),
    ("tpu", (17, 17), 256, 2, 64, 0.0, False, False),
    ("tpu", (17, 17), 256, 4, 5, 20.0, False, False),
    ("tpu", (33, 100), 16, 1, 0, 20.0, False, False),
    ("tpu", (33, 100), 16, 4, 64, 0.0, True, True),
    ("tpu", (33, 100), 80, 2, 5, 20.0, True, False),
    ("tpu", (100, 33), 64, 4, 5, 0.0, False, False),
    ("tpu", (100, 33), 192, 1, 64, 20.0, False, False),
    ("tpu", (100, 33), 256, 2, 0, 20.0, True, True),
    ("tpu", (127, 127), 16, 2, 5, 20.0, False, False),
    ("tpu", (127, 127), 80, 1, 64, 20.0, True, True),
    ("tpu", (127, 127), 192, 4, 0, 0.0, False, False),
    ("tpu", (129, 129), 80, 4, 0, 0.0, False, False),
    ("tpu", (129, 129), 192, 2, 5, 20.0, True, True),
    ("tpu", (129, 129), 256, 1, 64, 0.0, True, True),
]
BOTH_LENGTHS = [(1, 129), (33, 100), (100, 33), (129, 129)]
LENGTHS = {
    "gpu": [*BOTH_LENGTHS, (1, 127), (64, 64), (192, 192)],
    "tpu": [*BOTH_LENGTHS, (1, 1), (17, 17), (127, 127)],
}
FACTORS = [[16, 64, 80, 128, 192, 256], [1, 2, 4], [0, 5, 64], [0.0, 20.0], [False, True], [False, True]]
BOTH = pytest.mark.parametrize("platform", ["gpu", "tpu"])


def seen(T, S, causal, window, q_segments, k_segments):
    """Returns the mask [B, T, S] by the kernel's contract: query t is at position t + S - T."""
    place, key = np.arange(T)[:, None] + S - T, np.arange(S)[None, :]
    mask = np.ones((T, S), bool)
    if causal:
        mask &= key <= place
    if window:
        mask &= abs(place - key) < window
    return mask[None] & (q_segments[:, :, None] == k_segments[:, None, :])


def exact(q, k, v, d_out, mask, scale, softcap):
    """Returns the output and gradients of sum(output * d_out), in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[1]
    wide_k, wide_v = (x.repeat(group, 1) for x in (k, v))  # one key head per query head: [B, N, S, H]
    raw = np.einsum("btnh,bnsh->bnts", q, wide_k) * scale
    capped = softcap * np.tanh(raw / softcap) if softcap else raw
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    shown = np.where(mask[:, None], capped, -np.inf)
    high = np.where(mask.any(-1)[:, None], shown.max(-1), 0.0)
    weights = np.exp(shown - high[..., None])
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bnts,bnsh->btnh", weights, wide_v)
    on_weights = np.einsum("btnh,bnsh->bnts", d_out, wide_v)
    scores = weights * (on_weights - (weights * on_weights).sum(-1, keepdims=True)) * slope * scale

    def by_key_head(x):
        return x.reshape(x.shape[0], k.shape[1], group, *x.shape[2:]).sum(2)

    dq = np.einsum("bnts,bnsh->btnh", scores, wide_k)
    dk = by_key_head(np.einsum("bnts,btnh->bnsh", scores, q))
    dv = by_key_head(np.einsum("bnts,btnh->bnsh", weights, d_out))
    return out, dq, dk, dv


def draw(lengths, head_dim, group, segmented, dtype="float32"):
    """Returns (q, k, v, d_out) and the segments of queries and keys, which are ones if not segmented."""
    (T, S), B = lengths, 2
    generator = np.random.default_rng(T + S + head_dim)
    shapes = [(B, T, KEY_HEADS * group, head_dim), *[(B, KEY_HEADS, S, head_dim)] * 2]
    q, k, v, d_out = (jnp.asarray(generator.standard_normal(s), dtype) for s in (*shapes, shapes[0]))
    of_keys = np.sort(generator.integers(0, 3, (B, S)), 1) if segmented else np.ones((B, S), int)
    before = np.full((B, max(T - S, 0)), 0 if segmented else 1)  # queries before the first key
    of_queries = np.concatenate([before, of_keys], 1)[:, -T:]
    return (q, k, v, d_out), of_queries.astype(np.int32), of_keys.astype(np.int32)


def with_gradients(function):
    def run(q, k, v, d_out, *segments):
        out, pull = jax.vjp(lambda *arrays: function(*arrays, *segments), q, k, v)
        return out, *pull(d_out)

    return jax.jit(run)


def errors(cell, dtype="float32", interpret=True, **options):
    """Returns the largest errors of output, dq, dk and dv, each relative to its largest value if that is above 1."""
    platform, lengths, head_dim, group, window, softcap, segmented, causal = cell
    arrays, q_segments, k_segments = draw(lengths, head_dim, group, segmented, dtype)
    scores = {"scale": head_dim**-0.5, "softcap": softcap}
    segments = (q_segments, k_segments) if segmented else (None, None)

    def attend(q, k, v):
        masks = {"causal": causal, "window": window}
        return flash_attention(q, k, v, *segments, **masks, **scores, platform=platform, interpret=interpret, **options)

    got = with_gradients(attend)(*arrays)
    want = exact(*arrays, seen(*lengths, causal, window, q_segments, k_segments), **scores)
    assert [x.dtype for x in got] == [dtype] * 4
    return [
        np.abs(np.asarray(a, np.float64) - b).max() / max(1, np.abs(b).max()) for a, b in zip(got, want, strict=True)
    ]


def is_right(cell, dtype="float32", **options):
    return max(errors(cell, dtype, **options)) <= LIMIT[dtype]  # false for NaN


@BOTH
def test_the_cells_cover_every_pair(platform):
    cells = [cell[1:] for cell in CELLS if cell[0] == platform]
    factors = [LENGTHS[platform], *FACTORS]
    for i, j in itertools.combinations(range(len(factors)), 2):
        met = {(cell[i], cell[j]) for cell in cells}
        if (i, j) != (0, 1):
            assert met == set(itertools.product(factors[i], factors[j])), (i, j)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)).replace(" ", ""))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_output_and_gradients(dtype, cell):
    found = errors(cell, dtype)
    assert max(found) <= LIMIT[dtype], found


@pytest.mark.parametrize("cell", CELLS[1:21:5], ids=lambda cell: "-".join(map(str, cell)).replace(" ", ""))
def test_output_and_gradients_in_float16(cell):
    found = errors(cell, "float16")
    assert max(found) <= LIMIT["float16"], found


@BOTH
@pytest.mark.parametrize("head_dim", [20, 100, 200])
def test_heads_of_any_size(platform, head_dim):
    """Head sizes that are not multiples of a tensor core tile (20, 100) or end within a part (200), with all masks."""
    assert is_right((platform, (70, 90), head_dim, 2, 50, 20.0, True, True))


@BOTH
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 40), (False, 40), (False, 0)])
def test_sums_over_many_tiles(platform, causal, window):
    """Tiles outside the mask are skipped (before, after, on both sides), and tiles fully inside need no mask."""
    size = {"gpu": 16, "tpu": 128}[platform]
    tile = Tile(size, size)
    scaled = {"gpu": (70, 90), "tpu": (500, 600)}[platform]
    cell = (platform, scaled, 16, 2, window * size // 16, 0.0, False, causal)
    assert is_right(cell, tiles=Tiles(tile, tile, tile))


@BOTH
def test_packed_rows_are_the_reference_s(platform):
    """Packed rows as in the data pipeline: positions restart in each segment; padding is segment 0 at the end."""
    (q, k, v, _), _, _ = draw((100, 100), 16, 2, False)
    segments = jnp.asarray(np.stack([np.repeat([1, 2, 3, 0], [40, 7, 33, 20]), np.repeat([1, 2, 0], [1, 98, 1])]))
    starts = np.stack([np.repeat([0, 40, 47, 80], [40, 7, 33, 20]), np.repeat([0, 1, 99], [1, 98, 1])])
    positions = jnp.asarray(np.arange(100)[None] - starts)
    mask = reference.attention_mask(positions, positions, segments, segments, 20)
    want = reference.attention(q, k, v, mask, scale=0.25, softcap=0.0)
    options = {"causal": True, "window": 20, "scale": 0.25, "softcap": 0.0, "platform": platform, "interpret": True}
    got = jax.jit(lambda *a: flash_attention(*a, segments, segments, **options))(q, k, v)
    np.testing.assert_allclose(got, want, atol=1e-5)


@BOTH
def test_queries_that_see_nothing_give_exactly_nothing(platform):
    arrays, other, k_segments = draw((40, 24), 16, 2, False)
    options = {"causal": True, "window": 0, "scale": 0.25, "softcap": 20.0, "platform": platform, "interpret": True}
    run = with_gradients(lambda *a: flash_attention(*a, k_segments, **options))

    assert not any(np.asarray(x).any() for x in run(*arrays, np.full_like(other, 2)))  # no key is in their segment
    found = [np.asarray(x) for x in run(*arrays, np.full_like(other, 1))]
    assert all(np.isfinite(x).all() for x in found)
    out, dq = found[:2]
    assert not out[:, :16].any()  # before the first key
    assert not dq[:, :16].any()
    assert np.abs(out[:, 16:]).max(axis=(2, 3)).all()


@BOTH
def test_ten_repeats_are_identical(platform):
    arrays, q_segments, k_segments = draw((129, 129), 16, 4, True, "bfloat16")
    options = {"causal": True, "window": 0, "scale": 0.25, "softcap": 0.0, "platform": platform, "interpret": True}
    run = with_gradients(lambda *a: flash_attention(*a, q_segments, k_segments, **options))
    first = [np.asarray(x).tobytes() for x in run(*arrays)]
    assert all([np.asarray(x).tobytes() for x in run(*arrays)] == first for _ in range(9))


def test_the_tpu_kernels_read_nothing_that_is_not_there():
    """The TPU interpreter fills uninitialized memory with NaN and raises on out-of-bounds reads."""
    cell = ("tpu", (129, 150), 80, 2, 0, 20.0, True, True)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = errors(cell, interpret=False)
    assert max(found) <= LIMIT["float32"], found


def test_remat_keeps_what_the_names_say(capsys):
    """The backward kernels need only the output and lse besides the inputs."""
    arrays, _, _ = draw((16, 16), 16, 1, False)
    options = {"causal": True, "window": 0, "scale": 0.25, "softcap": 0.0, "platform": "gpu", "interpret": True}
    policy = jax.checkpoint_policies.save_only_these_names("attn_context", "attn_lse")
    attend = jax.checkpoint(lambda q, k, v: flash_attention(jnp.sin(q), k, v, **options), policy=policy)
    jax.ad_checkpoint.print_saved_residuals(attend, *arrays[:3])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" from ")[0].split()[0] for line in printed if "argument" not in line] == [
        "f32[2,16,2,16]",
        "f32[2,2,16]",
    ]
    assert "'attn_context'" in printed[-2]
    assert "'attn_lse'" in printed[-1]


@pytest.mark.parametrize(("causal", "window"), list(itertools.product([True, False], [0, 1, 5, 64])))
@pytest.mark.parametrize("lengths", [(1, 7), (40, 40), (33, 70), (70, 33)])
def test_the_tiles_visited_are_those_with_a_key_to_see(lengths, causal, window):
    T, S = lengths
    spec = AttentionSpec(T, S, causal, window, 1.0, 0.0)
    ones = np.ones((1, T), int), np.ones((1, S), int)
    mask = seen(T, S, causal, window, *ones)[0]
    np.testing.assert_array_equal(spec.mask(np.arange(T)[:, None], np.arange(S)[None], None, None), mask)
    for block in (4, 16):
        for first in range(0, T, block):
            needed = np.flatnonzero(mask[first : first + block].any(0)) // block
            assert set(range(*blocks_of(spec.key_range(first, min(first + block, T)), block))) == set(needed.tolist())
        for first in range(0, S, block):
            needed = np.flatnonzero(mask[:, first : first + block].any(1)) // block
            assert set(range(*blocks_of(spec.query_range(first, min(first + block, S)), block))) == set(needed.tolist())


def visited(length, causal, window, block=64):
    spec = AttentionSpec(length, length, causal, window, 1.0, 0.0)
    ranges = (blocks_of(spec.key_range(first, first + block), block) for first in range(0, length, block))
    return sum(end - first for first, end in ranges)


def test_work_is_half_for_causal_and_linear_for_a_window():
    assert visited(8192, False, 0) == 128**2
    assert visited(8192, True, 0) == 128 * 129 // 2
    assert visited(8192, True, 256) <= 128 * 5
    assert visited(16384, True, 256) - 2 * visited(8192, True, 256) <= 10  # the first queries have fewer tiles


FAULTS = {
    "mask off by one": lambda m: m.setattr(
        AttentionSpec, "mask", lambda self, rows, *a, real=AttentionSpec.mask: real(self, rows + 1, *a)
    ),
    "cap forgotten in the backward pass": lambda m: m.setattr(
        AttentionSpec, "softcap_backward", lambda self, s, ds: ds
    ),
    "last tile forgotten": lambda m: m.setattr(
        flash_common, "blocks_of", lambda *a: (blocks_of(*a)[0], blocks_of(*a)[1] - 1)
    ),
    "heads dealt out in turn": lambda m: [
        m.setattr(module, "key_head", lambda head, group: jax.lax.rem(head, KEY_HEADS))
        for module in (flash_triton, flash_tpu)
    ],
}


ONLY_ON_A_GPU = {
    "the first part of a head again and again": lambda m: m.setattr(
        flash_triton._Rows, "chunk", lambda self, index, real=flash_triton._Rows.chunk: real(self, 0)
    )
}
PLANTED = [
    *itertools.product(["gpu", "tpu"], FAULTS, ["float32"]),
    *itertools.product(["gpu", "tpu"], ["mask off by one"], ["bfloat16"]),
    *itertools.product(["gpu"], ONLY_ON_A_GPU, ["float32"]),
]


@pytest.mark.parametrize(("platform", "fault", "dtype"), PLANTED)
def test_planted_faults_are_caught(platform, fault, dtype, monkeypatch):
    cell = (platform, (129, 129), 192, 2, 5, 20.0, True, True)
    assert cell in CELLS  # without the fault the case is correct
    (FAULTS | ONLY_ON_A_GPU)[fault](monkeypatch)
    assert not is_right(cell, dtype)


def shaped(q=(1, 8, 4, 16), k=(1, 2, 8, 16), v=None, dtype="float32", **other):
    q, k, v = jnp.zeros(q, dtype), jnp.zeros(k, dtype), jnp.zeros(v or k, dtype)
    options = {"causal": True, "window": 0, "scale": 1.0, "softcap": 0.0, "platform": "gpu"}
    return flash_attention(q, k, v, **(options | other))


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ({"platform": "cpu"}, "for gpu and tpu, not 'cpu'"),
        ({"q": (1, 8, 3, 16)}, "3 query heads are not a multiple of 2 key heads"),
        ({"v": (1, 2, 9, 16)}, r"k and v \[B,K,S,H\]"),
        ({"q": (1, 8, 4, 8), "k": (1, 2, 8, 8)}, "head_dim 16 to 256, not 8"),
        ({"q": (1, 8, 4, 320), "k": (1, 2, 8, 320)}, "head_dim 16 to 256, not 320"),
        ({"dtype": "float16", "platform": "tpu"}, "tpu take q, k and v of one type of float32, bfloat16"),
        ({"dtype": "int32"}, "of one type of"),
        ({"q_segments": jnp.zeros((1, 8), jnp.int32)}, "of both queries and keys"),
        ({"q_segments": jnp.zeros((1, 9)), "k_segments": jnp.zeros((1, 8))}, r"q_segments have shape \(1, 9\)"),
        ({"window": -1}, "must be 0"),
    ],
)
def test_what_kernels_cannot_do_is_refused(asked, printed):
    with pytest.raises(UserError, match=printed):
        shaped(**asked)
