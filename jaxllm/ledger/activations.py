"""What transformer blocks keep for their backward pass, in bytes a token, by the block's own tags.

With c bytes a number in the compute dtype and 4 in float32, T the sequence length:

    tag            stacked over the scanned layers                             a block outside the scan
    block_input    D·4                                                         D·4
    norms          for each norm of width W: 2W·4 + 2·4 (beside its input)     W·c (its output)
    attn_qkv       3D·c (the norm's output, once a projection) + (N+2K)H·c     (N+2K)H·c
    attn_scores    N·T·(4 + c), with a soft cap N·T·8 more; N·2·4 statistics   N·T·4, and N·T·c where c is not 4
    attn_context   N·H·4 + N·H·c                                               the same
    resid_mid      D·4                                                         D·4
    mlp_*          see `_mlp`

A scanned layer's residuals are outputs of the scan: each is stored, also where two hold the same numbers
(x and 2x of a square; one matrix product's input reshaped three times). A block that is recomputed, or a layer
outside the scan, is open to the compiler, which merges and fuses those. The reference attention holds whole
scores, windows and all, so a sliding layer costs what a full one does.

The stacked counts follow from the derivative of each operation; XLA's CPU backend allocates exactly these
arrays. The counts of a block outside the scan, and all workspaces, are approximate.
"""

from jaxllm.config import Architecture

FLOAT32 = 4


def kept_per_token(model: Architecture, length: int, itemsize: int, stacked: bool) -> dict[str, int]:
    """Tag -> bytes a token that one block keeps.

    Args:
      length: keys a query is scored against, seen or not.
      itemsize: bytes of a number in the compute dtype.
      stacked: whether the block is an iteration of the scan over layers.
    """
    D, N, K, H, c = model.width, model.heads, model.kv_heads, model.head_dim, itemsize
    sandwich = model.norm_placement == "sandwich"
    kept = {"block_input": D * FLOAT32, "resid_mid": D * FLOAT32}

    def norm(width: int, count: int) -> int:
        return count * (2 * width * FLOAT32 + 2 * FLOAT32 if stacked else width * c)

    kept["norms"] = norm(D, 4 if sandwich else 2)
    if sandwich:
        kept["norms"] += 2 * D * FLOAT32  # inputs of the norms after the sub-layers
    if model.qk_norm:
        kept["norms"] += norm(H, N + K) + (N + K) * H * FLOAT32
    kept["attn_qkv"] = (N + 2 * K) * H * c + (3 * D * c if stacked else 0)
    copies = FLOAT32 + c if stacked or c != FLOAT32 else FLOAT32
    if model.attention_softcap and stacked:
        copies += 2 * FLOAT32
    kept["attn_scores"] = N * length * copies + 2 * N * FLOAT32
    kept["attn_context"] = N * H * (FLOAT32 + c)
    return kept | _mlp(model, itemsize, stacked)


def _mlp(model: Architecture, c: int, stacked: bool) -> dict[str, int]:
    """The MLP's part.

    Stacked, SwiGLU keeps gate, its sigmoid σ and 1 − σ, silu and up; the tanh form of GELU keeps x, 3x², tanh,
    1 − tanh and its factor; and the input of each matrix product is kept beside. Outside the scan: what each
    product reads and gives, and two steps of the activation. With experts every token counts once for each
    expert that it is sent to, and there are the routing's own numbers.
    """
    D, F, E = model.width, model.mlp_width, model.experts
    X = model.experts_per_token if E else 1
    if not stacked:
        gate = {"mlp_gate": 3 * X * F * c} if model.gated else {}
        return {"mlp_up": (1 if model.gated else 3) * X * F * c, **gate, "mlp_down": X * (F + (D if E else 0)) * c}
    activation = 4 if model.mlp == "swiglu" else 6
    kept = {}
    inputs = 1 if E else (2 if model.gated else 1)  # experts share their sorted tokens; a dense MLP reshapes twice
    if model.gated:
        kept["mlp_up"] = (X * F + inputs * X * D) * c
        kept["mlp_gate"] = activation * X * F * c
    else:
        kept["mlp_up"] = ((activation - 1) * X * F + inputs * X * D) * c
    kept["mlp_down"] = X * F * c
    if E:
        kept["mlp_down"] += X * D * c  # outputs in token order, mixed by the routing weights
        kept["routing"] = D * FLOAT32 + (2 * E + 5 * X) * FLOAT32
    return kept


def workspace_per_token(model: Architecture, length: int, c: int, stacked: bool) -> int:
    """Temporaries of the backward pass of one scan iteration, which is one run of the layer pattern.

    Gradients of the scores and probabilities, and of the MLP's hidden layer; for each layer of the pattern the
    residuals cut out of their stacks (two a norm, one of the attention) and about seven hidden states.
    """
    D, N, H, F = model.width, model.heads, model.head_dim, model.mlp_width
    norms = 4 if model.norm_placement == "sandwich" else 2
    X = model.experts_per_token if model.experts else 1
    if not stacked:  # the MLP's residuals are gone by the time that attention's gradients are taken
        return 7 * D * FLOAT32 + max(X * F * c, N * length * FLOAT32 - sum(_mlp(model, c, stacked=False).values()))
    scores = 3 if model.attention_softcap else 2
    cut = len(model.pattern) * ((2 * norms + 7) * D + (2 if model.qk_norm else 1) * N * H)
    return scores * N * length * FLOAT32 + X * F * c + cut * FLOAT32


def expanded_experts_per_token(model: Architecture) -> int:
    """XLA's CPU backend makes a ragged product from a plain one, over inputs repeated for every expert."""
    return model.experts * model.experts_per_token * (3 * model.width + 2 * model.mlp_width) * FLOAT32
