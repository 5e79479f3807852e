"""Hypothesis strategies for the property tests: small models of every published family, and runs of them."""

import copy
import dataclasses
import math
import re
from fractions import Fraction

from hypothesis import reject, settings
from hypothesis import strategies as st

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import CHOICES, Architecture, Config
from jaxllm.errors import UserError
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import BOUNDARY, HOST, Ledger

POLICIES = ("fp32", "bf16", "fp16", "bf16_pure")
REMAT = ("none", "full", "sqrt", "dots", "names:attn_qkv,mlp_up", "offload:attn_context")
# Fields in which models of one family differ.
_SIZES = {
    *("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "context_length", "window"),
    *("experts", "experts_per_token", "norm_eps", "init_std", "embedding_scale", "query_scale", "router_aux_weight"),
    *("rope_theta", "rope_theta_sliding", "rope_scaling", "rope_factor", "rope_original_context"),
    *("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow"),
    *("rope_dim", "rope_short_factors", "rope_long_factors", "rope_attention_factor"),
}

closed_form = settings(max_examples=60, deadline=None)  # a few milliseconds each
traced = settings(max_examples=12, deadline=None)  # a tenth of a second each


def _families() -> dict[str, str]:
    """Returns the name of the first published model of each structure -> that structure."""
    found: dict[str, str] = {}
    for name, model in ARCHITECTURES.items():
        fields = {key: value for key, value in vars(model).items() if key not in _SIZES}
        capped = bool(model.attention_softcap), bool(model.logit_softcap)
        structure = repr((fields, capped, bool(model.experts), bool(model.rope_theta_sliding), bool(model.rope_dim)))
        if structure not in found.values():
            found[name] = structure
    return found


FAMILIES = tuple(_families())


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run to bill: model, configuration, precision policy and platform.

    Attributes:
      policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
    """

    model: Architecture
    config: Config
    policy: str
    platform: str

    def but(self, **fields) -> "Case":
        """Returns a copy with other fields: a model's, or a configuration's as `section_field`."""
        config, model = copy.deepcopy(self.config), self.model
        for name, value in fields.items():
            section, _, field = name.partition("_")
            if field and hasattr(config, section):
                assert hasattr(getattr(config, section), field), name
                setattr(getattr(config, section), field, value)
            else:
                model = dataclasses.replace(model, **{name: value})
        return dataclasses.replace(self, model=model, config=config)

    @property
    def ledger(self) -> Ledger:
        """The ledger without TPU tile padding (`test_tiles.py`). Rejects the draw if the trainer would refuse it."""
        try:
            ledger = training_memory.training(self.model, self.config, self.policy, self.platform)
            return dataclasses.replace(ledger, rows=tuple(row for row in ledger.rows if row.kind != "tile padding"))
        except UserError as refused:
            assert "would be padded" in str(refused)  # noqa: PT017
            reject()


def evaluated(formula: str) -> Fraction:
    """Evaluates the arithmetic of a row's formula, without its words; `8 bits` are a byte, and ", " begins a remark."""
    text = formula.rpartition(" = ")[0].partition(", ")[0].replace(",", "")
    text = re.sub(r"(\d+) bits", r"\1 / 8", text)
    text = re.sub(r"[A-Za-z][A-Za-z'-]*", "", text)
    text = re.sub(r"(\d+)", r"Fraction(\1)", text)
    for sign, python in (("×", "*"), ("−", "-"), ("⌊", "floor("), ("⌋", ")")):
        text = text.replace(sign, python)
    return eval(text, {"Fraction": Fraction, "floor": lambda value: Fraction(math.floor(value))})


def row_bytes(ledger: Ledger, phase: str) -> dict[str, int]:
    """Returns the bytes of a phase's rows, by name."""
    return {row.name: row.bytes_per_device for row in ledger.rows if row.phase == phase}


def padding(ledger: Ledger) -> int:
    return sum(row.bytes_per_device for row in ledger.rows if row.name.startswith("padding"))


def state_bytes(ledger: Ledger) -> int:
    """Returns the bytes of all persistent state, in device and host memory."""
    return ledger.persistent_bytes + ledger.host_bytes - ledger.kind_bytes("activations", HOST)


def activations(ledger: Ledger) -> int:
    """Returns the bytes of saved activations, in device and host memory."""
    return ledger.kind_bytes("activations", BOUNDARY) + ledger.kind_bytes("activations", HOST)


def known_bytes(ledger: Ledger) -> int:
    """Returns the exact sharded bytes: state, saved activations and gradient accumulators, without padding.

    XLA's workspace is excluded: it grows with the ZeRO stage, and it is not monotone.
    """
    return (
        state_bytes(ledger)
        - padding(ledger)
        + activations(ledger)
        + ledger.kind_bytes("gradient accumulator", BOUNDARY)
    )


@st.composite
def models(draw, families=FAMILIES) -> Architecture:
    """Draws a model of one of these families with other sizes."""
    base = ARCHITECTURES[draw(st.sampled_from(families))]
    kv_heads = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([8, 16, 64]))
    experts = draw(st.integers(2, 6)) if base.experts else 0
    return dataclasses.replace(
        base,
        layers=draw(st.integers(1, 9)),
        width=draw(st.sampled_from([16, 48, 128, 200])),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=head_dim,
        rope_dim=head_dim // 4 if base.rope_dim else 0,
        mlp_width=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(2, 1000)),
        window=draw(st.integers(1, 40)) if base.window else 0,
        experts=experts,
        experts_per_token=draw(st.integers(1, experts)) if experts else 0,
        tied_embeddings=draw(st.booleans()),
        unroll=draw(st.integers(1, 3)),
        rope_scaling="none",
    )


@st.composite
def configs(draw, policy: str, tensor: int = 1) -> Config:
    config = Config()
    config.precision.policy = policy
    config.train.accumulate = draw(st.integers(1, 4))
    config.mesh.replica, config.mesh.data = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    config.mesh.tensor, config.mesh.zero = tensor, draw(st.integers(0, 3))
    rows_of_devices = config.train.accumulate * config.mesh.replica * config.mesh.data
    config.train.batch_size = rows_of_devices * draw(st.integers(1, 4))
    config.data.sequence_length = 8 * draw(st.integers(1, 16))
    config.train.attention_chunk = draw(st.sampled_from([0, 4]))
    config.train.loss_chunk = draw(st.sampled_from([1, 16, 4096]))
    optimizer = config.optimizer
    optimizer.name = draw(st.sampled_from(CHOICES["optimizer.name"]))
    optimizer.moment_dtype = draw(st.sampled_from(CHOICES["optimizer.moment_dtype"]))
    optimizer.weight_decay = draw(st.sampled_from([0.0, 0.1]))
    if optimizer.name not in ("adafactor", "muon"):  # these do not update array by array
        masters = policy in ("bf16", "fp16")
        optimizer.offload = draw(st.sampled_from(["none", "moments", "all"] if masters else ["none", "moments"]))
    config.remat.policy = draw(st.sampled_from(REMAT))
    return config


@st.composite
def cases(draw, families=FAMILIES, split: bool = False) -> Case:
    """Draws a training run.

    Args:
      draw: Hypothesis's draw function.
      families: names of the models whose structure may be drawn.
      split: shard over `tensor` too.
    """
    policy = draw(st.sampled_from(POLICIES))
    tensor = draw(st.sampled_from([1, 2])) if split else 1
    config, model = draw(configs(policy, tensor)), draw(models(families))
    if tensor > 1:  # dimensions sharded over it divide, and so does a bias of the MLP, which has no other dimension
        shares = {"heads": tensor, "kv_heads": tensor, "mlp_width": 2 * tensor * config.mesh.data}
        model = dataclasses.replace(model, **{field: ways * getattr(model, field) for field, ways in shares.items()})
    return Case(model, config, policy, draw(st.sampled_from(["cpu", "gpu", "tpu"])))
