"""The transformer, as functions of a parameter tree.

One letter a dimension, everywhere in this package, in einsums and in jaxtyping signatures:

    B  batch (sequences)          D  model width              L  layers, or repeats of the layer pattern
    T  query positions            F  MLP width (one expert)   V  vocabulary
    S  key positions, cache slots N  query heads              E  experts
    M  tokens, B × T flattened    K  key/value heads          X  experts a token is sent to
                                  G  query heads a key head serves, N / K
                                  H  head dimension
"""
