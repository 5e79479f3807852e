"""Training state that persists between steps, on each device and in host memory: exact."""

import functools

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact import tpu_tiles
from jaxllm.ledger.formula.exact.layout import Layout
from jaxllm.ledger.formula.exact.optimizer_slots import slot_rows
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.formula.exact.shard_sizes import Count, without_padding
from jaxllm.ledger.rows import Row, array_row

# Train state besides the arrays: step (int32) and PRNG key (2 × uint32).
_STATE_BYTES = 4 + 8
# fp16: loss scale (float32) and steps since it changed (int32).
_LOSS_SCALE_BYTES = 4 + 4
FROZEN = "frozen weights"


def state_rows(run: TrainingRun) -> list[Row]:
    """Returns the rows of the persistent training state, in device memory or in host memory.

    Under mixed precision, stored weights are float32 masters of 16-bit weights. ZeRO counts masters as optimizer
    state, so stage 1 shards them. Weights that are stored in the compute dtype are sharded by stage 3 (Rajbhandari et
    al. 2020, section 5).
    """
    kind = "master weights" if run.mixed else "weights"
    phase = rows.HOST if run.config.optimizer.offload == "all" else rows.PERSISTENT
    own, padding = _stored(run.layout, True)
    frozen = run.layout.frozen
    name = "LoRA adapters" if frozen else kind
    made = [array_row(name, kind, phase, own, run.param_bytes)]
    if padding:
        made.append(array_row(f"padding of {name}", kind, phase, padding, run.param_bytes))
    if frozen:  # in the compute dtype: no masters, no gradients, no moments
        own, padding = _stored(run.layout, False)
        made.insert(0, array_row(FROZEN, "weights", rows.PERSISTENT, own, run.compute_bytes))
        if padding:
            made.append(array_row(f"padding of {FROZEN}", "weights", rows.PERSISTENT, padding, run.compute_bytes))
    made += slot_rows(run)
    made.append(Row("step and key", "state", rows.PERSISTENT, _STATE_BYTES, f"{FLOAT32} B + 2 × 4 B"))
    if run.policy == "fp16":
        made.append(Row("loss scale", "state", rows.PERSISTENT, _LOSS_SCALE_BYTES, "4 B + 4 B"))
    if run.platform == "tpu":
        made.append(tpu_tiles.state_padding(run))
    return made


@functools.lru_cache(maxsize=4096)
def _stored(layout: Layout, trained: bool) -> tuple[Count, int]:
    """Returns the trained (or frozen) weights on one device, as (elements of the model, padding elements)."""
    stored = layout.count("weight", layout.trained if trained else layout.frozen)
    own = without_padding(stored)
    return own, stored - own
