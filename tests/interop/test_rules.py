"""Tensor mappings: bitwise round trips, sharded loading, bounded memory, and a check of every name."""

import dataclasses
import tracemalloc

import folders
import jax
import ml_dtypes
import models
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig
from jaxllm.errors import UserError
from jaxllm.interop import rules
from jaxllm.interop.huggingface import folder_rules
from jaxllm.model import specs
from jaxllm.parallel import mesh as mesh_lib

CASES = sorted(folders.FAMILIES)


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(f"u{a.dtype.itemsize}"), np.asarray(b).view(f"u{b.dtype.itemsize}"))


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_tree_to_tensors_to_tree(family, dtype):
    model = folders.FAMILIES[family]
    tree = folders.random_tree(model, dtype)
    tensors, table = folders.tensors(model, tree, family), folder_rules.build_rules(model, family)
    assert {name: x.shape for name, x in tensors.items()} == rules.saved_shapes(model, table)
    assert sum(x.size for x in tensors.values()) == specs.parameter_count(model)
    back = rules.load(model, table, tensors.__getitem__, dtype)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(same_bits, back, tree))
    # The bits of a NaN are preserved too, and one changed bit is detected.
    name = next(iter(tensors))
    tensors[name] = tensors[name].copy()
    tensors[name].flat[0] = np.nan
    changed = rules.load(model, table, tensors.__getitem__, dtype)
    assert not jax.tree.all(jax.tree.map(same_bits, changed, tree))


def test_arrays_are_padded_to_the_shapes_asked_for():
    """Arrays are padded with zeros beyond the model's rows, as a mesh stores a vocabulary that it does not divide."""
    model = dataclasses.replace(folders.FAMILIES["qwen3"], vocab_size=61)
    tree, table = folders.random_tree(model), folder_rules.build_rules(model, "qwen3")
    tensors = folders.tensors(model, tree, "qwen3")
    whole = NamedSharding(mesh_lib.make_mesh(MeshConfig(data=8)), PartitionSpec())
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)
    rows = NamedSharding(whole.mesh, PartitionSpec("data"))
    targets["embed"]["tokens"] = jax.ShapeDtypeStruct((80, model.width), ml_dtypes.bfloat16, sharding=rows)
    found = rules.load(model, table, tensors.__getitem__, ml_dtypes.bfloat16, targets)
    table_found = np.asarray(found["embed"].pop("tokens"))
    assert same_bits(table_found[:61], tree["embed"].pop("tokens"))
    assert not table_found[61:].any()
    assert jax.tree.all(jax.tree.map(same_bits, found, tree))


def test_another_dtype_is_cast_once():
    model = folders.FAMILIES["llama"]
    tree = folders.random_tree(model, np.float32)
    tensors = folders.tensors(model, tree, "llama")
    found = rules.load(model, folder_rules.build_rules(model, "llama"), tensors.__getitem__, ml_dtypes.bfloat16)
    wanted = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tree)
    assert jax.tree.all(jax.tree.map(same_bits, found, wanted))


class Counted:
    """NumPy wrapper that records the shapes of the arrays it creates."""

    def __init__(self):
        self.made = set()

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, *arguments):
        self.made.add(tuple(shape))
        return np.empty(shape, *arguments)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "qwen3_moe", "smollm3"])
@pytest.mark.parametrize("zero", [0, 3])
def test_each_device_gets_its_share(family, zero, monkeypatch):
    """With 8 devices, values are equal and no host array is larger than one device's shard."""
    model = dataclasses.replace(folders.FAMILIES[family], heads=4, kv_heads=2 if family != "gpt2" else 4, head_dim=8)
    tree, table = folders.random_tree(model), folder_rules.build_rules(model, family)
    tensors = folders.tensors(model, tree, family)
    config = MeshConfig(data=4, tensor=2, zero=zero)
    mesh = mesh_lib.make_mesh(config)
    declared = specs.param_specs(model)
    shardings = jax.tree.map(
        lambda placed: mesh_lib.named_sharding(mesh, placed), mesh_lib.placements(declared, config, "weights", False)
    )
    host = Counted()
    monkeypatch.setattr(rules, "np", host)
    found = rules.load(model, table, tensors.__getitem__, ml_dtypes.bfloat16, shardings)
    monkeypatch.undo()
    assert jax.tree.all(jax.tree.map(same_bits, found, tree))
    shares = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(found)}
    assert host.made
    assert host.made <= shares
    split = [x for x in jax.tree.leaves(found) if not x.sharding.is_fully_replicated]
    assert split
    assert all(shard.data.size < x.size for x in split for shard in x.addressable_shards)


def test_memory_is_the_tree_and_one_array():
    """NumPy allocates at most the tree and one array; the source tensors exist before, as a file's pages do."""
    model = dataclasses.replace(models.ROTARY, width=128, mlp_width=512, layers=8, vocab_size=512)
    tree, table = folders.random_tree(model), folder_rules.build_rules(model, "llama")
    tensors = folders.tensors(model, tree, "llama")
    final = sum(x.nbytes for x in jax.tree.leaves(tree))
    largest = max(x.nbytes for x in jax.tree.leaves(tree))
    rules.load(model, table, tensors.__getitem__, ml_dtypes.bfloat16)  # warm up: excludes memory that JAX keeps
    tracemalloc.start()
    found = rules.load(model, table, tensors.__getitem__, ml_dtypes.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= final + largest + 200_000, (peak, final, largest)
    assert jax.tree.all(jax.tree.map(same_bits, found, tree))


def test_all_missing_and_unexpected_names_are_reported():
    model = folders.FAMILIES["qwen3"]
    names = set(folders.tensors(model, folders.random_tree(model), "qwen3"))
    table = folder_rules.build_rules(model, "qwen3")
    rules.check(table, names, "x")
    gone = {"model.layers.0.self_attn.k_norm.weight", "model.norm.weight"}
    more = {"model.layers.0.self_attn.z_norm.weight", "score.weight"}
    with pytest.raises(UserError) as caught:
        rules.check(table, names - gone | more, "x")
    message = str(caught.value)
    assert "2 missing" in message
    assert "2 unexpected" in message
    assert all(name in message for name in gone | more)
    assert "k_norm.weight (found model.layers.0.self_attn.z_norm.weight)" in message


@pytest.mark.parametrize("family", CASES)
def test_a_tensor_of_another_shape_is_named_before_any_is_read(family):
    model = folders.FAMILIES[family]
    table = folder_rules.build_rules(model, family)
    shapes = rules.saved_shapes(model, table)
    rules.check_shapes(model, table, shapes.__getitem__)
    for name in list(shapes)[:: max(1, len(shapes) // 8)]:
        wrong = shapes | {name: (shapes[name][0] + 2, *shapes[name][1:])}
        with pytest.raises(UserError, match=rf"{name} \[.*use the weights and the configuration of one release"):
            rules.check_shapes(model, table, wrong.__getitem__)


def test_a_rule_forgotten_is_a_fault_that_shows():
    model = folders.FAMILIES["llama"]
    table = folder_rules.build_rules(model, "llama")
    with pytest.raises(KeyError):
        rules.check_shapes(model, table[:-1], rules.saved_shapes(model, table).__getitem__)


def test_shares_that_are_wrong_would_show():
    """The comparison of sharded and plain trees detects swapped rows."""
    model = folders.FAMILIES["qwen3"]
    tree = folders.random_tree(model)
    placed = jax.device_put(
        tree["head" if "head" in tree else "embed"]["tokens"][::-1],
        NamedSharding(mesh_lib.make_mesh(MeshConfig(data=8)), PartitionSpec("data")),
    )
    assert not same_bits(placed, tree["embed"]["tokens"])
