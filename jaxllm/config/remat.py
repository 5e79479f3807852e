"""What blocks may keep for their backward pass, as a configuration says it. No JAX is imported.

The tags are the system's one vocabulary of activations: blocks name what they compute by them, remat policies
choose among them, and the ledger's rows carry them.
"""

import dataclasses
import difflib

from jaxllm.errors import UserError

# In the order in which a block computes them; `lora` is what goes between the two matrices of each adapter.
TAGS = (
    "attn_norm",
    "attn_qkv",
    "attn_scores",
    "attn_probs",
    "attn_context",
    "attn_lse",  # of the kernels: log of a query's sum of weights, beside attn_context
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
# What products with weights give.
PRODUCTS = ("attn_qkv", "attn_out", "mlp_up", "mlp_gate", "mlp_down", "lora")
KINDS = ("none", "full", "sqrt", "dots", "names", "offload")


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """Attributes:
    kind: of KINDS.
    tags: kept on the device (`names`) or in host memory (`offload`); empty for the others.
    """

    kind: str
    tags: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Tags whose values wait for the backward pass, on the device or off it; a block's input always does.

        Under `sqrt` these are the blocks' of one group of layers at a time.
        """
        if self.kind in ("none", "sqrt"):
            return TAGS
        return {"full": (), "dots": PRODUCTS}.get(self.kind, self.tags)


def parse(policy: str) -> RematPolicy:
    """The policy that `config.remat.policy` names: `full`, `names:attn_qkv,mlp_up`, …

    Raises:
      UserError: an unknown kind or tag, with the nearest.
    """
    kind, colon, listed = policy.partition(":")
    tags = tuple(tag.strip() for tag in listed.split(",")) if listed.strip() else ()
    if kind not in KINDS:
        raise UserError(
            f"config.remat.policy is {policy!r}; it must be {_forms()} (did you mean {_near(kind, KINDS)!r}?)"
        )
    if (kind in ("names", "offload")) != bool(tags) or bool(colon) != bool(tags):
        raise UserError(f"config.remat.policy is {policy!r}; it must be {_forms()}")
    for tag in tags:
        if tag not in TAGS:
            raise UserError(
                f"config.remat.policy names {tag!r}, which no block computes; did you mean {_near(tag, TAGS)!r}? "
                f"(all: {', '.join(TAGS)})"
            )
    return RematPolicy(kind, tags)


def _forms() -> str:
    return "none, full, sqrt, dots, names:<tag,tag> or offload:<tag,tag>"


def _near(word: str, words: tuple[str, ...]) -> str:
    return difflib.get_close_matches(word, words, n=1, cutoff=0.0)[0]
