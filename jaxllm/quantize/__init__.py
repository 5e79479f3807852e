"""Weight-only quantization for inference: matrices in 8 or 4 bits, activations in the compute dtype.

`formats` names the formats, `weight` stores a matrix in one, and `product` multiplies with it. Embeddings, head, norms,
biases and routers of experts stay in the compute dtype.
"""
