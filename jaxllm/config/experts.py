"""How inference multiplies tokens with experts; the model and the ledger read the same choice.

This module does not import JAX.
"""

# With at most this many tokens, multiplying each with all experts takes no longer than reading the experts' weights.
_MEMORY_BOUND = 64

CHOSEN, ALL, BLOCKS = "chosen", "all", "blocks"


def method(tokens: int, experts_per_token: int, experts: int) -> str:
    """Returns how a pass of `tokens` tokens multiplies them with experts.

    Returns:
      CHOSEN: each token with its own experts, whose matrices are read in place; at most as many as there are experts.
      ALL: each token with all experts, which are then likely to be chosen; their weights are read once.
      BLOCKS: blocks of tokens of one expert each, as in training; each block slices its expert's matrix.
    """
    if tokens * experts_per_token <= experts:
        return CHOSEN
    return ALL if tokens <= _MEMORY_BOUND else BLOCKS
