"""Transformer model as pure functions of a parameter tree.

Each dimension has one letter, in einsums and in jaxtyping signatures:

    B  batch (sequences)             D  model width                    L  layers, or repeats of the layer pattern
    T  query positions (tokens)      F  MLP width (of one expert)      V  vocabulary
    S  key positions, cache slots    N  query heads                    E  experts
    M  tokens, B × T flattened       K  key/value heads                X  experts per token (top-k)
    C  tokens of one chunk           H  head dimension                 P  learned positions
    R  rotated elements of a head    G  query heads per key/value head, N / K

A lowercase letter is the part of that dimension in this call or on this device: t tokens (T / `tensor`), v vocabulary
rows, s key positions (cached or cached and new). Inside `jax.shard_map`, N, K, F and the batch dimension B are always
this device's shard. In jaxtyping strings, `heads` is N or K, and `*batch` or `*inputs` is any number of dimensions.

Terms used in this package:

    layer pattern   sequence of layer kinds that repeats; kinds: full | sliding | nope (full, without rotary positions)
    repeats         number of times the whole pattern occurs; the length of the scan over layers
    tail            layers after the last whole pattern, outside the scan
    spec            `ParamSpec`: shape, logical axes and initialization of one array; parameters, adapters and KV cache
                    are trees of specs
    placement       `Placement`: stored shape and mesh axes of one array (`jaxllm.parallel.mesh`)
    collectives     `Collectives` for the mesh sizes of a run (`jaxllm.parallel.collectives`); SINGLE_DEVICE by default
    slot            index into a layer's KV cache; position p is stored in slot p mod S
    tag             name that a block gives an activation; remat policies select activations by tag
"""
