"""Placement of arrays on a mesh: golden tables, padding, and what is refused."""

import dataclasses

import jax
import models
import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import MeshConfig
from jaxllm.errors import UserError
from jaxllm.model.specs import leaves, param_specs
from jaxllm.parallel import mesh
from jaxllm.parallel.mesh import TENSOR_RULES, Placement, placement, placements, sharded


def is_placement(node):
    return isinstance(node, Placement)


def split(model, **axes):
    """Returns name -> placement of the weights under ZeRO 3."""
    tree = placements(param_specs(model), MeshConfig(zero=3, **axes), "weights", mixed=True)
    return {
        mesh.path_name(path): placed for path, placed in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_placement)
    }


def test_llama3_8b_on_four_by_two():
    """Golden table: every weight is sharded over both axes; heads, MLP and vocabulary over tensor."""
    found = {name: placed.axes for name, placed in split(ARCHITECTURES["llama3-8b"], data=4, tensor=2).items()}
    assert found == {
        "embed.tokens": (("tensor", "data"), ()),
        "final_norm.scale": (("data",),),
        "head": (("tensor", "data"), ()),
        "layers.0.attn.k": ((), ("data",), ("tensor",), ()),
        "layers.0.attn.out": ((), ("tensor", "data"), (), ()),
        "layers.0.attn.q": ((), ("data",), ("tensor",), ()),
        "layers.0.attn.v": ((), ("data",), ("tensor",), ()),
        "layers.0.attn_norm.scale": ((), ("data",)),
        "layers.0.mlp.down": ((), ("tensor", "data"), ()),
        "layers.0.mlp.gate": ((), ("data",), ("tensor",)),
        "layers.0.mlp.up": ((), ("data",), ("tensor",)),
        "layers.0.mlp_norm.scale": ((), ("data",)),
    }


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma3-27b", "gpt2"])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 1024}, {"data": 64, "tensor": 4}])
def test_nothing_is_left_whole(name, axes):
    """Under ZeRO 3 each array is sharded over `data`, and padding is a small part of a model."""
    model = ARCHITECTURES[name]
    if model.heads % axes.get("tensor", 1):
        axes = {"data": 64}
    placed = split(model, **axes)
    assert all(p.zero_dim is not None for p in placed.values())
    stored = sum(p.elements_per_device for p in placed.values())
    specs = leaves(param_specs(model))
    count = sum(spec.size for spec in specs)
    ways = axes["data"] * axes.get("tensor", 1)
    assert count / ways <= stored < 1.2 * count / ways


def test_a_vocabulary_that_does_not_divide_is_padded():  # jax#26946, #27808
    sizes = mesh.axis_sizes(MeshConfig(tensor=8))
    placed = placement("embed", (17, 16), ("vocab", "embed"), sizes, zero=False)
    assert placed.shape == (24, 16)
    assert placed.elements_per_device == 3 * 16
    # Over `data`, the other dimension is used if it divides.
    sizes = mesh.axis_sizes(MeshConfig(data=8))
    placed = placement("embed", (17, 16), ("vocab", "embed"), sizes, zero=True)
    assert (placed.shape, placed.axes) == ((17, 16), ((), ("data",)))
    # 5 over 4: the dimension that needs the least padding.
    sizes = mesh.axis_sizes(MeshConfig(data=4))
    placed = placement("embed", (5, 3), ("vocab", "embed"), sizes, zero=True)
    assert (placed.shape, placed.zero_dim, placed.gathered) == ((5, 4), 1, 3)


def test_what_cannot_be_padded_is_refused_with_names_and_sizes():
    sizes = mesh.axis_sizes(MeshConfig(tensor=4))
    with pytest.raises(UserError, match=r"layers.0.attn.q\[2, 8, 6, 4\]: heads \(6\).*tensor \(4\)"):
        placement("layers.0.attn.q", (2, 8, 6, 4), ("layers", "embed", "heads", "head_dim"), sizes, zero=False)
    with pytest.raises(UserError, match=r"up_bias\[2, 12\].*tensor \(2\) × mesh axis data \(5\)"):
        placement("up_bias", (2, 12), ("layers", "mlp"), mesh.axis_sizes(MeshConfig(tensor=2, data=5)), zero=True)


def test_two_axes_on_one_mesh_axis_are_refused():
    with pytest.raises(AssertionError, match="one mesh axis"):
        placement("x", (4, 4), ("heads", "mlp"), mesh.axis_sizes(MeshConfig(tensor=2)), zero=False)


def test_stages_shard_one_kind_more_each():
    table = {stage: [sharded(kind, stage, False) for kind in ("moments", "gradients", "weights")] for stage in range(4)}
    assert table == {0: [False] * 3, 1: [True, False, False], 2: [True, True, False], 3: [True] * 3}
    assert [sharded("weights", stage, True) for stage in range(4)] == [False, True, True, True]


def test_every_rule_names_an_axis_that_a_model_has():
    names = {axis for model in models.ALL.values() for spec in leaves(param_specs(model)) for axis in spec.axes}
    assert set(TENSOR_RULES) <= names
    assert mesh.LAYER_AXIS in names


def test_a_mesh_that_does_not_match_the_devices_is_refused():
    with pytest.raises(UserError, match="needs 16 devices"):
        mesh.make_mesh(MeshConfig(data=16))
    made = mesh.make_mesh(MeshConfig(data=2, tensor=2))
    assert dict(made.shape) == {"replica": 1, "data": 2, "tensor": 2}


def test_the_count_is_the_mesh_s():
    mesh.require_count(MeshConfig(data=4, tensor=2), 8)
    with pytest.raises(
        UserError, match=r"--count is 8, but config.mesh needs 4 devices \(.*data 4.*--config.mesh.data=8"
    ):
        mesh.require_count(MeshConfig(data=4), 8)


def test_shares_on_a_device_are_what_jax_says():
    """Compares `elements_per_device` with NamedSharding's own shard shape."""
    config = MeshConfig(data=2, tensor=2, zero=3)
    devices = mesh.make_mesh(config)
    for name in models.ALL:
        model = dataclasses.replace(models.ALL[name], vocab_size=67)
        tree = placements(param_specs(model), config, "weights", mixed=False)
        for placed in jax.tree.leaves(tree, is_leaf=is_placement):
            shape = mesh.named_sharding(devices, placed).shard_shape(placed.shape)
            size = 1
            for n in shape:
                size *= n
            assert placed.elements_per_device == size
