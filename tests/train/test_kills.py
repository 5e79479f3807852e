"""SIGKILL at random times: a run that survives them ends bitwise equal to an undisturbed one."""

import random
import signal
import time

import jax
import numpy as np
import pytest
import runs

from jaxllm.train import metrics

KILLS = 20
STEPS = 700
EVERY = 7  # steps between checkpoints


def start(config_file, workdir, cache):
    return runs.started(
        ["-m", "jaxllm.train", f"--config={config_file}", f"--workdir={workdir}"], **runs.compiled_once(cache)
    )


def finish(process):
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, out + errors


@pytest.mark.slow
def test_random_kills_end_bitwise_equal(tmp_path):
    corpus = runs.write_corpus(tmp_path / "corpus", files=20)
    config_file = tmp_path / "c.py"
    config_file.write_text(
        "import runs\n\ndef get_config():\n"
        f"    return runs.tiny_config({corpus!r}, train_steps={STEPS}, checkpoint_every={EVERY}, log_every=100)\n"
    )
    finish(start(config_file, tmp_path / "whole", tmp_path / "cache"))

    chance = random.Random(0)
    record = tmp_path / "killed" / "metrics.jsonl"
    reached = []
    while len(reached) < KILLS:
        process = start(config_file, tmp_path / "killed", tmp_path / "cache")
        begun = record.stat().st_mtime_ns if record.exists() else 0
        if chance.random() < 0.8:  # most die while training or saving, the rest at any point of the start
            while process.poll() is None and (not record.exists() or record.stat().st_mtime_ns == begun):
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.2))
        else:
            time.sleep(chance.uniform(0.0, 3.0))  # its imports, which have nothing to lose, are done
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed: raise STEPS"
        reached.append(len(metrics.read(record)) if record.exists() else 0)
    # Past the first checkpoint, from which the next run resumes.
    assert max(reached) > EVERY, f"the kills must land in training, not only before it: {reached}"
    finish(start(config_file, tmp_path / "killed", tmp_path / "cache"))

    _, got = runs.trained(tmp_path / "killed")
    _, want = runs.trained(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    losses = [
        [r["loss"] for r in metrics.read(tmp_path / name / "metrics.jsonl") if r["kind"] == "step"]
        for name in ("killed", "whole")
    ]
    assert losses[0] == losses[1]
