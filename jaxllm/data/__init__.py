"""Training data, from documents to packed batches. This file has no data packages, so that programs import it alone."""

import numpy as np

# Fields of a batch that are copied to the device, each [batch, sequence_length]. A host batch also has `documents`
# (int32, index of each token's document, -1 on padding).
BATCH_FIELDS: dict[str, type] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,  # from 1 in each row; 0 is padding; attention stays within a segment
    "positions": np.int32,  # from 0 at the start of each document and of its continuation in later rows
    "weights": np.float32,  # 1 if the target counts; 0 on padding and, in conversations, outside answers
}

Batch = dict[str, np.ndarray]
