"""Inference on several devices gives the text of one; weights and cache are sharded, not copied."""

import collections
import dataclasses

import folders
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm import programs
from jaxllm.config import inference_mesh
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.decode import cache, sharding
from jaxllm.decode import state as state_lib
from jaxllm.decode.sampling import SamplingOptions, make_params
from jaxllm.decode.weights import WeightLayout, layout_for
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.engine.weights import arrange, load_weights
from jaxllm.errors import UserError
from jaxllm.interop.opening import open_model
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.ledger.compiled import collectives as collectives_lib
from jaxllm.ledger.compiled import hlo
from jaxllm.model import specs
from jaxllm.parallel.mesh import make_mesh

PROMPTS = ["The cat", "def f(x):\n    return", "x"]
REQUEST = SampleRequest(max_new_tokens=12, sampling=SamplingOptions(temperature=1.0, seed=3))


def generator(model, sizes=None, **options):
    params = specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)
    mesh = None if sizes is None else make_mesh(sizes.config)
    return Generator(model, params, ByteTokenizer(), jnp.float32, chunk=8, steps=4, mesh=mesh, **options)


# The vocabulary of 261 does not divide, and four devices outnumber the two key/value heads of most models.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, InferenceMesh(tensor=4)) for name in models.ALL),
        ("sliding", InferenceMesh(data=2, tensor=2)),
        ("experts", InferenceMesh(data=2, tensor=2)),
    ],
)
def test_tokens_of_one_device(name, sizes):
    model = dataclasses.replace(models.ALL[name], vocab_size=261)
    results, _ = generator(model).generate(PROMPTS, REQUEST)
    sharded, times = generator(model, sizes).generate(PROMPTS, REQUEST)
    assert sharded == results
    assert times.prompt_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("options", [{"cache_dtype": jnp.int8}, {"use_cache": False}], ids=["int8", "no cache"])
def test_tokens_of_one_device_with_other_caches(options):
    model = dataclasses.replace(models.SLIDING, vocab_size=261)
    results, _ = generator(model, **options).generate(PROMPTS, REQUEST)
    assert generator(model, InferenceMesh(data=2, tensor=2), **options).generate(PROMPTS, REQUEST)[0] == results


def test_arrays_are_sharded():
    """Every large array is sharded over `tensor`; key/value heads are stored twice, where devices outnumber them."""
    model, sizes = dataclasses.replace(models.ROTARY, vocab_size=261), InferenceMesh(tensor=4)
    made = generator(model, sizes)
    made.generate(PROMPTS[:1], REQUEST)
    shard = dataclasses.replace(sizes.shard(model), vocab_size=66)  # 261 and 3 of padding, over 4
    assert (shard.heads, shard.kv_heads, shard.mlp_width) == (1, 1, 12)
    assert made.live["weights"] == 4 * specs.parameter_count(shard)
    for x in jax.tree.leaves(made._params):
        assert len(x.sharding.device_set) == 4
        assert x.sharding.is_fully_replicated == (x.ndim == 1), x.shape  # only norms


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("rotary", InferenceMesh(tensor=4)),
        ("sliding", InferenceMesh(data=2, tensor=2)),
        ("experts", InferenceMesh(data=2, tensor=2)),
    ],
)
def test_layout_of_tpus(name, sizes):
    """Stacked layers decode on a mesh as per-layer ones do on one device."""
    model = models.ALL[name]
    params = specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) * 3
    outputs = []
    for mesh, layout in ((None, WeightLayout.PER_LAYER), (make_mesh(sizes.config), WeightLayout.TPU)):
        arranged = arrange(params, model, jnp.float32, mesh, layout=layout).tree
        like = sharding.abstract_state(model, 2, 32, jnp.float32, layout, mesh)
        sampling = make_params([REQUEST.sampling] * 2, list(tokens), model.vocab_size)
        state = state_lib.start(model, cache.create_like(like.cache), sampling, [8, 8], [(), ()])
        state = state if mesh is None else sharding.place(state, like)
        prefill = programs.prefill(model, 2, 8, 32, jnp.float32, layout=layout, mesh=mesh).compile()
        decode = programs.decode(model, 2, 8, 32, jnp.float32, layout=layout, mesh=mesh).compile()
        state = prefill(arranged, state, tokens, np.ones((2, 8), bool))
        outputs.append(np.asarray(decode(arranged, state, np.int32(8))[1]))
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("name", models.ALL)
def test_one_all_reduce_per_sub_layer(name):
    """A decoded token is all-reduced twice per layer and once after the embedding; its logits are all-gathered."""
    model, sizes = models.ALL[name], InferenceMesh(data=2, tensor=2)
    program = programs.decode(model, 2, 4, 32, jnp.float32, layout=WeightLayout.PER_LAYER, mesh=make_mesh(sizes.config))
    found = collectives_lib.collectives(hlo.parse(program.compile().as_text()))
    counts = collections.Counter((one.op, one.devices) for one in found)
    # Norms over whole projections: XLA combines the sum of squares of queries with that of keys.
    norms = model.layers if model.qk_norm_over == "projection" else 0
    assert counts == {("all-reduce", 2): 2 * model.layers + 1 + norms, ("all-gather", 2): 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenor=2", "'tenor' is not an axis; did you mean tensor"),
        ("tensor", "tensor must be a positive number"),
        ("tensor=0", "tensor must be a positive number"),
        ("tensor=2,tensor=4", "tensor is given twice"),
        ("", "axes are data and tensor"),
    ],
)
def test_errors_of_the_flag(text, message):
    with pytest.raises(UserError, match=message):
        inference_mesh.parse(text)


def test_sizes_that_do_not_divide():
    assert inference_mesh.parse("data=2, tensor=4") == InferenceMesh(2, 4)
    with pytest.raises(
        UserError, match=r"heads \(4\) and kv_heads \(2\) cannot be sharded over 3 devices; sizes that work: 1, 2, 4$"
    ):
        InferenceMesh(tensor=3).shard(models.ROTARY)
    with pytest.raises(UserError, match=r"kv_heads \(6\)"):
        InferenceMesh(tensor=4).shard(dataclasses.replace(models.ROTARY, heads=12, kv_heads=6))


@pytest.mark.parametrize("sizes", [InferenceMesh(tensor=4), InferenceMesh(data=2, tensor=2)], ids=str)
def test_weights_are_read_to_their_shards(tmp_path, sizes):
    """A folder's weights on a mesh are those of the model, and no device reads or holds more than its shard."""
    model = dataclasses.replace(models.ROTARY, vocab_size=261)
    tree = folders.random_tree(model, np.float32)
    opened = open_model(str(folders.write(tmp_path / "model", model, tree)))
    mesh = make_mesh(sizes.config)
    loaded, made = load_weights(opened, jnp.float32, mesh).tree, arrange(tree, model, jnp.float32, mesh).tree
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(x, y)
    wanted = sharding.abstract_params(model, jnp.float32, layout_for("cpu"), mesh)
    for x, like in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        assert x.sharding == like.sharding
