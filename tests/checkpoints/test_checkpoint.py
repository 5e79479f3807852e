"""Checkpoints are complete or absent, verified when read, and never deleted by mistake."""

import shutil

import jax
import numpy as np
import pytest
import runs

from jaxllm import architectures, programs
from jaxllm.checkpoints import checkpoint
from jaxllm.errors import UserError
from jaxllm.parallel import mesh


@pytest.fixture(scope="module")
def run():
    config = runs.tiny_config("unused", optimizer_name="adamw")
    devices = mesh.make_mesh(config.mesh)
    step_spec = programs.make_step_spec(config, architectures.resolve(config.model), "cpu")
    state = programs.init_state(config, step_spec, devices).jitted()
    return config, state, programs.abstract_state(config, step_spec, devices)


def saved(tmp_path, run, steps=(1, 2)):
    config, state, _ = run
    store = checkpoint.Checkpointer(tmp_path, config, lambda text: None)
    for step in steps:
        store.save(step, at(state, step), {"at": step})
    store.close()
    return tmp_path / "checkpoints"


def at(state, step):
    return state.replace(params=jax.tree.map(lambda x: x + step, state.params))


def restored(tmp_path, run):
    said = []
    store = checkpoint.Checkpointer(tmp_path, run[0], said.append)
    try:
        return store.restore(run[2]), said
    finally:
        store.close()


def assert_is_step(found, run, step):
    assert found.step == step
    assert found.data_state == {"at": step}
    assert jax.tree.structure(found.state) == jax.tree.structure(run[1])
    jax.tree.map(np.testing.assert_array_equal, found.state, at(run[1], step))


def test_round_trip_keeps_the_newest_two(tmp_path, run):
    folder = saved(tmp_path, run, (1, 2, 3))
    assert sorted(p.name for p in folder.iterdir()) == ["00000002", "00000003"]
    found, said = restored(tmp_path, run)
    assert_is_step(found, run, 3)
    assert said == []
    config, params = runs.trained(tmp_path)
    assert config == run[0]
    jax.tree.map(np.testing.assert_array_equal, params, at(run[1], 3).params)


def biggest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    file = biggest(folder)
    file.write_bytes(file.read_bytes()[:-7])


def flip(folder):
    file = biggest(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "truncated file": (truncate, "bytes instead of"),
    "flipped bit": (flip, "CRC-32"),
    "missing file": (lambda folder: biggest(folder).unlink(), "is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "torn manifest": (lambda folder: (folder / "manifest.json").write_text('{"fil'), "manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_newest_is_skipped_and_kept(tmp_path, run, name):
    damage, word = DAMAGES[name]
    folder = saved(tmp_path, run)
    damage(folder / "00000002")
    _, params = runs.trained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params, at(run[1], 1).params)
    found, said = restored(tmp_path, run)
    assert_is_step(found, run, 1)
    assert len(said) == 1
    assert word in said[0]
    assert sorted(p.name for p in folder.iterdir()) == ["00000001", "00000002.damaged"]
    # Training on from step 1 saves step 2 again. The damaged checkpoint does not count towards those to keep.
    saved(tmp_path, run, (2,))
    assert sorted(p.name for p in folder.iterdir()) == ["00000001", "00000002", "00000002.damaged"]


def test_all_damaged_is_an_error_that_deletes_nothing(tmp_path, run):
    folder = saved(tmp_path, run)
    for path in folder.iterdir():
        flip(path)
    with pytest.raises(UserError, match="every checkpoint"):
        restored(tmp_path, run)
    assert len(list(folder.iterdir())) == 2


def test_killed_after_each_written_file(tmp_path, run):
    """After a kill that leaves any prefix of the files under the staging name, the previous checkpoint is used."""
    folder = saved(tmp_path / "run", run)
    files = sorted(p.relative_to(folder / "00000002") for p in (folder / "00000002").rglob("*") if p.is_file())
    for count in range(len(files)):
        work = tmp_path / f"killed{count}"
        shutil.copytree(folder / "00000001", work / "checkpoints" / "00000001")
        for file in files[:count]:
            target = work / "checkpoints" / ".writing-2" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "00000002" / file, target)
        found, said = restored(work, run)
        assert found.step == 1
        assert said == []


def test_copied_workdir_resumes(tmp_path, run):
    saved(tmp_path / "here", run)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    found, said = restored(tmp_path / "there", run)
    assert_is_step(found, run, 2)
    assert said == []


def test_other_configuration_is_refused(tmp_path, run):
    saved(tmp_path, run)
    other = runs.tiny_config("unused", optimizer_name="lion")
    store = checkpoint.Checkpointer(tmp_path, other, lambda text: None)
    with pytest.raises(UserError, match=r"config.optimizer.name was 'adamw' and is now 'lion'"):
        store.restore(run[2])
    store.close()


def test_full_disk_is_reported_before_writing(tmp_path, run, monkeypatch):
    folder = saved(tmp_path, run, (1,))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    store = checkpoint.Checkpointer(tmp_path, run[0], lambda text: None)
    with pytest.raises(UserError, match=r"cannot save the checkpoint of step 2: .*free.*00000001"):
        store.save(2, run[1], {})
    store.close()
    assert [p.name for p in folder.iterdir()] == ["00000001"]


def test_failed_background_write_is_reported_and_leaves_the_last_good(tmp_path, run, monkeypatch):
    folder = saved(tmp_path, run, (1,))

    def full(path, files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.manifest, "write", full)
    store = checkpoint.Checkpointer(tmp_path, run[0], lambda text: None)
    store.save(2, run[1], {})
    with pytest.raises(UserError, match=r"step 2.*No space left.*00000001"):
        store.wait()
    store.close()
    assert [p.name for p in folder.iterdir()] == ["00000001"]


def test_not_a_workdir(tmp_path):
    with pytest.raises(UserError, match="not the workdir"):
        runs.trained(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no usable checkpoint"):
        runs.trained(tmp_path)
