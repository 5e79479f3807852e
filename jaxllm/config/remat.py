"""Rematerialization policies and activation tags: which activations blocks save for the backward pass.

The tags name activations in the whole package: blocks tag their activations with them, remat policies select among
them, and ledger rows are labelled with them. This module does not import JAX.
"""

import dataclasses
import math

from jaxllm.errors import UserError, nearest

# In the order in which a block computes them; `lora` is the activation between the two matrices of each adapter.
TAGS = (
    "attn_norm",
    "attn_qkv",
    "attn_scores",
    "attn_probs",
    "attn_context",
    "attn_lse",  # flash kernels only: log-sum-exp of each query's scores, saved along with attn_context
    "attn_out",
    "resid_mid",
    "mlp_norm",
    "mlp_up",
    "mlp_gate",
    "mlp_hidden",
    "mlp_down",
    "mlp_out",
    "lora",
)
# Outputs of matmuls with weights.
MATMUL_TAGS = ("attn_qkv", "attn_out", "mlp_up", "mlp_gate", "mlp_down", "lora")
KINDS = ("none", "full", "sqrt", "dots", "names", "offload")
_SYNTAX = "none, full, sqrt, dots, names:<tag,tag> or offload:<tag,tag>"


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """Parsed rematerialization policy.

    Attributes:
      kind: one of KINDS.
      tags: activations saved on the device (`names`) or in host memory (`offload`); empty for other kinds.
    """

    kind: str
    tags: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Tags of the activations saved for the backward pass, on the device or host; block inputs are always saved.

        Under `sqrt` all tags are saved, for the blocks of one group of layers at a time.
        """
        if self.kind in ("none", "sqrt"):
            return TAGS
        return {"full": (), "dots": MATMUL_TAGS}.get(self.kind, self.tags)


def parse(policy: str) -> RematPolicy:
    """Parses `config.remat.policy`, such as `full` or `names:attn_qkv,mlp_up`.

    Raises:
      UserError: the kind or a tag is unknown; suggests the nearest one.
    """
    kind, colon, listed = policy.partition(":")
    tags = tuple(tag.strip() for tag in listed.split(",")) if listed.strip() else ()
    if kind not in KINDS:
        raise UserError(
            f"config.remat.policy is {policy!r}; it must be {_SYNTAX} (did you mean {nearest(kind, KINDS)!r}?)"
        )
    if (kind in ("names", "offload")) != bool(tags) or bool(colon) != bool(tags):
        raise UserError(f"config.remat.policy is {policy!r}; it must be {_SYNTAX}")
    for tag in tags:
        if tag not in TAGS:
            raise UserError(
                f"config.remat.policy has the unknown tag {tag!r}; did you mean {nearest(tag, TAGS)!r}? "
                f"(supported: {', '.join(TAGS)})"
            )
    return RematPolicy(kind, tags)


def group_size(repeats: int, policy: RematPolicy) -> int:
    """Returns the number of pattern repeats per `sqrt` group: the divisor of `repeats` nearest √repeats (log scale).

    Each group saves its input, and during its own backward pass the activations of all its blocks. The sum of both
    counts is smallest near √repeats (Chen et al. 2016). Returns 1 under other policies.
    """
    if policy.kind != "sqrt" or not repeats:
        return 1
    divisors = (size for size in range(1, repeats + 1) if repeats % size == 0)
    return min(divisors, key=lambda size: abs(math.log(size / math.sqrt(repeats))))
