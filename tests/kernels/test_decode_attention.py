"""Decode attention: the interpreted kernel of each platform, compared with float64 and token by token."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.decode import api as decode_lib
from jaxllm.kernels.decode import common as decode_common
from jaxllm.kernels.decode import gpu as decode_gpu
from jaxllm.kernels.decode import write_tpu as decode_write_tpu
from jaxllm.kernels.decode.api import decode_attention
from jaxllm.kernels.decode.common import DecodeSpec

LAYER, LAYERS = 1, 2
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    H: int = 16
    group: int = 2
    S: int = 200
    T: int = 1
    window: int = 0
    ring: bool = False
    softcap: float = 0.0
    int8: bool = False
    dtype: str = "float32"
    K: int = 1
    layers: int = 1

    @property
    def reach(self):
        """Effective window: the length of the ring if the layer has one, else the window."""
        return self.S if self.ring else self.window

    @property
    def capacity(self):
        return 3 * self.S if self.ring else self.S

    @property
    def lengths(self):
        """Lengths: empty, full and between; in a ring the newest token is in the first slot, the last, or another."""
        S = self.S
        if self.ring:
            return [0, S + 1, 2 * S, S // 2]
        return [0, S, max(S // 2, 1)]


# Every pair of values of two columns occurs, except some of head_dim and slots: see `test_every_pair_is_covered`.
CASES = [
    Case(16, 1, 1, 1, ring=True, softcap=5.0),
    Case(16, 4, 127, 3, window=24, int8=True, dtype="bfloat16"),
    Case(16, 8, 129, 1, dtype="bfloat16"),
    Case(64, 1, 512, 3, softcap=5.0, int8=True),
    Case(64, 4, 512, 1, window=24, softcap=5.0, dtype="bfloat16"),
    Case(64, 8, 1, 3, ring=True, int8=True),
    Case(80, 1, 129, 1, window=24, softcap=5.0, int8=True),
    Case(80, 4, 129, 3, ring=True, dtype="bfloat16"),
    Case(80, 8, 127, 1, softcap=5.0),
    Case(128, 1, 1, 3, window=24, dtype="bfloat16"),
    Case(128, 4, 1, 1, softcap=5.0, int8=True),
    Case(128, 8, 512, 3, ring=True, dtype="bfloat16"),
    Case(192, 1, 127, 1, ring=True, softcap=5.0, int8=True, dtype="bfloat16"),
    Case(192, 4, 1, 3),
    Case(192, 8, 1, 1, window=24, int8=True),
    Case(256, 1, 1, 3, ring=True, softcap=5.0, dtype="bfloat16"),
    Case(256, 4, 1, 1, int8=True),
    Case(256, 8, 1, 1, window=24, softcap=5.0, dtype="bfloat16"),
    Case(192, 8, 129, 8, window=24, softcap=5.0),
]
SMALL = Case(T=3, K=2, layers=LAYERS)
RING = Case(S=130, ring=True)
NAMES = [f"{c.S}-{c.T}x{c.group}-{c.H}-{c.dtype}" for c in CASES]


@functools.cache
def arrays(case):
    """Returns (q, k, v, scales): values at the scale of real layers, with every slot filled."""
    keys = jax.random.split(jax.random.key(case.S + case.H), 3)
    B = len(case.lengths)
    q = jax.random.normal(keys[0], (B, case.T, case.K * case.group, case.H), case.dtype)
    k, v = (jax.random.normal(key, (case.layers, B, case.K, case.S, case.H), case.dtype) for key in keys[1:])
    if not case.int8:
        return q, k, v, {}
    (k, k_scale), (v, v_scale) = decode_common.quantize(k), decode_common.quantize(v)
    return q, k, v, {"k_scale": k_scale, "v_scale": v_scale}


@functools.cache
def compiled(case, platform):
    def run(q, k, v, lengths, layer, scales):
        options = {"window": case.reach, "scale": case.H**-0.5, "softcap": case.softcap, "capacity": case.capacity}
        interpret = platform != "cpu"
        return decode_attention(
            q, k, v, lengths, layer=layer, **scales, **options, platform=platform, interpret=interpret
        )

    return jax.jit(run)


def kernel(case, platform, lengths=None):
    q, k, v, scales = arrays(case)
    lengths = jnp.array(case.lengths if lengths is None else lengths, jnp.int32)
    layer = jnp.int32(case.layers - 1)
    return np.asarray(compiled(case, platform)(q, k, v, lengths, layer, scales), np.float64)


def float64(case):
    """Computes attention in float64 by position, with each token in the slot that the definition gives."""
    q, k, v, scales = arrays(case)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k[-1], v[-1]))
    if scales:
        k, v = (x * np.asarray(s[-1], np.float64)[..., None] for x, s in zip((k, v), scales.values(), strict=True))
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        length = case.lengths[b]
        position = length - case.T + t
        earliest = max(0, length - case.S, position - case.reach + 1 if case.reach else 0)
        slots = [p % case.S for p in range(earliest, position + 1)]
        if slots:
            scores = k[b, n // case.group, slots] @ q[b, t, n] * case.H**-0.5
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ v[b, n // case.group, slots]
    return out


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_against_float64(case, platform):
    got, want = kernel(case, platform), float64(case)
    assert np.abs(got - want).max() <= LIMITS[case.dtype]
    assert np.abs(want).max() > 0.1
    assert np.all(got[0] == 0), "a row of no tokens"


def test_the_reference_against_float64():
    for case in (SMALL, RING, dataclasses.replace(SMALL, int8=True)):
        assert np.abs(kernel(case, "cpu") - float64(case)).max() <= 1e-5


def uncovered(cases):
    """Returns the pairs of values of two columns that occur in no case."""
    rows = [(c.H, c.S, c.group, c.T, (c.ring, c.window > 0), c.softcap, c.int8, c.dtype) for c in cases]
    values = [sorted({row[i] for row in rows}, key=str) for i in range(len(rows[0]))]
    missing = []
    for i, j in itertools.combinations(range(len(values)), 2):
        if (i, j) != (0, 1):
            pairs = set(itertools.product(values[i], values[j]))
            missing += [(i, j, *pair) for pair in pairs - {(row[i], row[j]) for row in rows}]
    return missing


def test_every_pair_is_covered():
    pairwise = [case for case in CASES if case.T < 8]  # the one case of 8 tokens and 8 heads is outside the grid
    assert len({case.H for case in pairwise}) == 6
    assert not uncovered(pairwise)
    assert uncovered(pairwise[1:])


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_long_cache(platform):
    case = Case(S=4097, group=1, dtype="bfloat16")
    got = kernel(case, platform)
    assert np.abs(got - float64(case)).max() <= LIMITS["bfloat16"]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_ten_runs_are_one(platform):
    got = kernel(SMALL, platform)
    for _ in range(10):
        np.testing.assert_array_equal(kernel(SMALL, platform), got)


def test_float16_on_a_gpu():
    case = dataclasses.replace(SMALL, dtype="float16")
    assert np.abs(kernel(case, "gpu") - float64(case)).max() <= LIMITS["float16"]
    with pytest.raises(ValueError, match="float16"):
        kernel(case, "tpu")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_no_window_reaches_is_not_read(platform, monkeypatch):
    """Slots that are a block away contain values that would corrupt any sum that reads them."""
    monkeypatch.setattr(decode_lib.decode_tpu, "block_length", lambda *_: 128)
    compiled.cache_clear()
    case = Case(S=512, window=24)
    q, k, v, _ = arrays(case)
    lengths = jnp.array([40, 512, 300], jnp.int32)
    slot = jnp.arange(512)[None, :]
    outside = (slot >= lengths[:, None] + 128) | (slot < lengths[:, None] - 24 - 128)
    spoiled = jnp.where(outside[None, :, None, :, None], jnp.nan, v)
    args = (lengths, jnp.int32(0), {})
    run = compiled(case, platform)
    np.testing.assert_array_equal(run(q, k, spoiled, *args), run(q, k, v, *args))
    assert bool(outside.any(1).all())


def test_one_layer_s_cache_without_a_stack():
    q, k, v, _ = arrays(SMALL)
    lengths = jnp.array(SMALL.lengths, jnp.int32)
    options = {"window": 0, "scale": 0.25, "softcap": 0.0, "capacity": SMALL.S, "platform": "cpu"}
    stacked = decode_attention(q, k, v, lengths, layer=LAYER, **options)
    np.testing.assert_array_equal(decode_attention(q, k[LAYER], v[LAYER], lengths, **options), stacked)
    assert (np.asarray(stacked) != decode_attention(q, k[0], v[0], lengths, **options)).any()


def test_auto_is_the_reference_on_a_cpu():
    q, k, v, _ = arrays(SMALL)
    lengths = jnp.array(SMALL.lengths, jnp.int32)
    options = {"window": 0, "scale": 0.25, "softcap": 0.0, "capacity": SMALL.S, "layer": LAYER}
    got = jax.jit(lambda: decode_attention(q, k, v, lengths, **options, platform="auto"))()
    want = jax.jit(lambda: decode_attention(q, k, v, lengths, **options, platform="cpu"))()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "cuda"}, "cuda"),
        ({"platform": "auto", "interpret": True}, "auto"),
        ({"k_scale": jnp.zeros((LAYERS, 3, 2, 200)), "v_scale": jnp.zeros((LAYERS, 3, 2, 200))}, "int8"),
        ({"layer": None}, "stacks"),
    ],
)
def test_arguments_that_do_not_belong_together(change, words):
    q, k, v, _ = arrays(SMALL)
    good = {"layer": 0, "window": 0, "scale": 1.0, "softcap": 0.0, "capacity": 200, "platform": "cpu"}
    with pytest.raises(ValueError, match=words):
        decode_attention(q, k, v, jnp.array(SMALL.lengths), **good | change)
    with pytest.raises(ValueError, match="9 new tokens"):
        decode_attention(jnp.zeros((3, 9, 4, 16)), k, v, jnp.array(SMALL.lengths), **good)


def test_offsets_that_32_bits_do_not_reach():
    assert decode_gpu.can_index((2**31,), 1)
    assert not decode_gpu.can_index((2**31 + 1,), 1)
    assert not decode_gpu.can_index((32, 8, 8, 16_384, 128), 1), "2 bytes per element would be 8 GiB, and indexed"
    assert decode_gpu.can_index((32, 8, 8, 16_384, 128), 2)
    assert decode_gpu.can_index((2**32 + 1,), 1)
    big = {"k": jax.ShapeDtypeStruct((32, 8, 8, 16_384, 128), jnp.int8)}
    scale = jax.ShapeDtypeStruct(big["k"].shape[:-1], jnp.float32)
    q = jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)

    def run(q, k, v, lengths, k_scale, v_scale):
        options = {"window": 0, "scale": 1.0, "softcap": 0.0, "capacity": 16_384, "layer": 3, "platform": "gpu"}
        return decode_attention(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale, **options)

    assert jax.eval_shape(run, q, big["k"], big["k"], lengths, scale, scale).shape == q.shape


def test_a_layer_taken_out_of_the_stack_gives_the_same(monkeypatch):
    case = dataclasses.replace(SMALL, int8=True)
    got = kernel(case, "gpu")
    monkeypatch.setattr(decode_lib.decode_gpu, "can_index", lambda shape, _: shape[0] == 1)
    compiled.cache_clear()
    np.testing.assert_array_equal(kernel(case, "gpu"), got)
    compiled.cache_clear()


def test_a_head_is_made_of_powers_of_two():
    assert decode_gpu.head_parts(80) == [(0, 64), (64, 16)]
    assert decode_gpu.head_parts(256) == [(0, 256)]
    with pytest.raises(ValueError, match="head_dim is 72"):
        decode_gpu.head_parts(72)


def test_int8_is_off_by_half_a_step_at_most():
    x = jax.random.normal(jax.random.key(0), (3, 5, 16)).at[1, 2].set(0.0)
    values, scale = decode_common.quantize(x)
    error = np.abs(np.asarray(decode_common.dequantize(values, scale) - x))
    assert (error <= np.asarray(scale)[..., None] * 0.5001).all()
    assert np.abs(np.asarray(values)).max() == 127
    assert scale[1, 2] == 0
    np.testing.assert_array_equal(values[1, 2], 0)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("S", [5, 140])
@pytest.mark.parametrize(("T", "int8"), [(1, False), (1, True), (9, False), (200, True)])
def test_writing_tokens_on_a_tpu(S, H, T, int8):
    stack = jax.random.normal(jax.random.key(0), (LAYERS, 4, 2, S, H))
    token = jax.random.normal(jax.random.key(1), (4, 2, T, H))
    stacks, tokens = {"k": stack, "v": 2 * stack}, {"k": token, "v": -token}
    if int8:
        stacks, tokens = map(as_int8, (stacks, tokens))
    starts = np.array([0, S - 1, 0, S // 2])
    slots = (starts[:, None] + np.arange(T)) % S
    slots[:, : max(T - S, 0)] = S  # of tokens with the same slot, only the last one is written
    slots[2] = S  # a row that writes nothing
    slots[3, : T // 3] = S  # a padded row
    write = jax.jit(functools.partial(decode_write_tpu.write_tokens, interpret=True))
    got = write(stacks, tokens, jnp.int32(LAYER), jnp.array(slots))
    assert got.keys() == stacks.keys()
    for name, stack in stacks.items():
        want = np.array(stack)
        for row, t in np.ndindex(4, T):
            if slots[row, t] < S:
                want[LAYER, row, :, slots[row, t]] = tokens[name][row, :, t]
        np.testing.assert_array_equal(got[name], want)
        assert got[name].dtype == stack.dtype


def as_int8(arrays):
    quantized = {name: decode_common.quantize(x) for name, x in arrays.items()}
    return {name: x for name, (x, _) in quantized.items()} | {f"{name}_scale": s for name, (_, s) in quantized.items()}


def rejected(case, platform):
    compiled.cache_clear()
    try:
        return not np.abs(kernel(case, platform) - float64(case)).max() <= LIMITS[case.dtype]
    finally:
        compiled.cache_clear()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_faults_are_caught(platform, monkeypatch):
    assert not rejected(SMALL, platform)
    assert not rejected(RING, platform)

    mask = DecodeSpec.mask
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSpec, "mask", lambda self, slot, query, length: mask(self, slot, query, length - 1))
        assert rejected(SMALL, platform), "a length off by one"
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSpec, "mask", lambda self, slot, query, length: mask(self, slot, query + 1, length))
        assert rejected(SMALL, platform), "a token that sees the next"
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSpec, "mask", lambda self, slot, query, length: slot < jax.lax.rem(length, 130))
        assert rejected(RING, platform), "a ring taken for a cache that begins anew"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_combine_without_rescaling_is_caught(platform, monkeypatch):
    case = Case(S=512, H=128)
    monkeypatch.setattr(decode_lib.decode_tpu, "split_count", lambda *_: 2)
    monkeypatch.setattr(decode_lib.decode_tpu, "block_length", lambda *_: 128)
    assert not rejected(case, platform)

    def plain(acc, m, l):
        return acc.sum(1) / jnp.maximum(l.sum(1), 1e-30)[..., None]

    monkeypatch.setattr(decode_lib, "combine", plain)
    assert rejected(case, platform)
