"""A checkpoint saved on any mesh, ZeRO stage and precision restores on any other, bit for bit."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxllm import architectures, programs
from jaxllm.checkpoints import checkpoint
from jaxllm.errors import UserError
from jaxllm.parallel import mesh
from jaxllm.train import metrics

# No mesh divides the vocabulary of 257, so each of these pads it differently or leaves it unpadded.
MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 4, "zero": 1},
    {"data": 8, "zero": 3},
    {"tensor": 2},
    {"data": 2, "tensor": 4, "zero": 2},
    {"replica": 2, "data": 2, "tensor": 2, "zero": 3},
    {"data": 8, "zero": 2},
]


def name(fields):
    return " ".join(f"{key}{value}" for key, value in fields.items())


def make_config(corpus, fields, **others):
    on_mesh = {f"mesh_{key}": value for key, value in fields.items()}
    sizes = {"model_heads": 4, "model_kv_heads": 4, "train_batch_size": 8, "train_steps": 4, "checkpoint_every": 2}
    return runs.tiny_config(corpus, **(sizes | on_mesh | others))


def abstract(config):
    step_spec = programs.make_step_spec(config, architectures.resolve(config.model), "cpu")
    return programs.abstract_state(config, step_spec, mesh.make_mesh(config.mesh))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    """Runs four steps on one device, with a checkpoint after the second."""
    workdir = tmp_path_factory.mktemp("base")
    config = make_config(corpus, MESHES[0])
    status, text = runs.train(config, workdir)
    assert status == 0, text
    return config, workdir


def after_two(workdir, target):
    """Copies the checkpoint of step 2 from `workdir` into `target`, and returns `target`."""
    shutil.copytree(workdir / "checkpoints" / "00000002", target / "checkpoints" / "00000002")
    return target


def restore(workdir, config):
    with checkpoint.Checkpointer(workdir, config, print) as store:
        return store.restore(abstract(config))


def save(workdir, config, state):
    with checkpoint.Checkpointer(workdir, config, print) as store:
        store.save(2, state, {"0": {}})
    return workdir


def assert_same_numbers(got, want):
    """Asserts that the common elements are bitwise equal and that all padding beyond them is zero."""

    def one(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert a.ndim == b.ndim
        common = tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
        np.testing.assert_array_equal(a[common], b[common])
        for array in (a, b):
            rest = array.copy()
            rest[common] = 0
            assert not rest.any()

    jax.tree.map(one, got.params, want.params)
    for a, b in zip(jax.tree.leaves(got.opt_state), jax.tree.leaves(want.opt_state), strict=True):
        one(a, b)
    assert int(got.step) == int(want.step)
    np.testing.assert_array_equal(got.key, want.key)


def test_opens_on_every_mesh_and_comes_back_unchanged(base, corpus, tmp_path):
    """Saves and restores on each mesh in turn and returns to the first: padded, padded to another size, cropped."""
    config, workdir = base
    want = restore(after_two(workdir, tmp_path / "start"), config).state
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(want.opt_state)), "moments that are not zero"
    place, shapes = tmp_path / "start", set()
    for fields in [*MESHES[1:], *MESHES[:1]]:
        here = make_config(corpus, fields)
        state = restore(place, here).state
        assert_same_numbers(state, want)
        wanted = jax.tree.map(lambda x: x.sharding, abstract(here))
        assert jax.tree.map(lambda x: x.sharding, state) == wanted, name(fields)
        shapes.add(str(jax.tree.map(jnp.shape, state.params)))
        place = save(tmp_path / name(fields), here, state)
        _, params = runs.trained(place)
        jax.tree.map(np.testing.assert_array_equal, params, want.params)
    assert len(shapes) > 2, "the meshes were to pad differently"


def test_the_comparison_can_fail(base):
    state = restore(base[1], base[0]).state
    off = state.replace(params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1e-6), state.params))
    with pytest.raises(AssertionError):
        assert_same_numbers(off, state)


@pytest.mark.slow
@pytest.mark.parametrize("fields", MESHES[1:7], ids=name)
def test_trains_on_with_the_same_losses(base, corpus, tmp_path, fields):
    workdir = after_two(base[1], tmp_path)
    status, text = runs.train(make_config(corpus, fields), workdir)
    assert status == 0, text
    assert "resuming" in text

    def losses(folder):
        records = metrics.read(folder / "metrics.jsonl")
        return {r["step"]: r["loss"] for r in records if r["kind"] == "step" and r["step"] > 2}

    want = losses(base[1])
    assert losses(workdir) == {step: pytest.approx(loss, abs=1e-5) for step, loss in want.items()}


PRECISIONS = [
    {"precision_policy": "bf16"},
    {"precision_policy": "bf16_pure"},
    {"precision_policy": "fp16", "precision_loss_scale": 64.0},
    {"optimizer_moment_dtype": "bfloat16"},
]


@pytest.mark.parametrize("fields", PRECISIONS, ids=name)
def test_opens_in_every_precision(base, corpus, tmp_path, fields):
    config, workdir = base
    want = restore(after_two(workdir, tmp_path / "from"), config).state
    other = make_config(corpus, MESHES[0], **fields)
    state = restore(tmp_path / "from", other).state
    dtypes = jax.tree.map(lambda x: x.dtype, abstract(other))
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    jax.tree.map(lambda got, x: np.testing.assert_array_equal(got, x.astype(got.dtype)), state.params, want.params)
    if fields.get("precision_policy") == "fp16":
        assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (64.0, 0)
    else:
        assert state.loss_scale is None
    back = restore(save(tmp_path / "to", other, state), config).state
    assert back.loss_scale is None
    jax.tree.map(lambda got, x: np.testing.assert_array_equal(got, x.astype(got.dtype)), back.params, state.params)


def test_the_loss_scale_survives(corpus, tmp_path):
    config = make_config(corpus, MESHES[0], precision_policy="fp16")
    step_spec = programs.make_step_spec(config, architectures.resolve(config.model), "cpu")
    state = programs.init_state(config, step_spec, mesh.make_mesh(config.mesh)).jitted()
    moved = dataclasses.replace(state.loss_scale, scale=jnp.float32(512.0), good_steps=jnp.int32(17))
    save(tmp_path, config, state.replace(loss_scale=moved))
    found = restore(tmp_path, config).state.loss_scale
    assert (float(found.scale), int(found.good_steps)) == (512.0, 17)


def test_a_configuration_from_before_a_field_existed_is_read(base, tmp_path):
    config, workdir = base
    folder = after_two(workdir, tmp_path) / "checkpoints" / "00000002"
    stored = json.loads((folder / "config.json").read_text())
    del stored["data"]["streams"], stored["optimizer"]["offload"], stored["mesh"]["zero"]
    checkpoint.check_same_run(stored, config, folder)
    del stored["optimizer"]["peak_lr"]  # of which this run has another value than the default
    with pytest.raises(UserError, match=r"config\.optimizer\.peak_lr was 0\.0003 and is "):
        checkpoint.check_same_run(stored, config, folder)
