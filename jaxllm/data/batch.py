"""What a batch is made of. Alone in its file, so that programs can be built where no reader of data is installed."""

import numpy as np

# The fields of a batch that go to the device, each [batch, sequence_length]. Beside them `documents` (int32, index of
# each token's document, -1 on padding) stays on the host.
BATCH_FIELDS: dict[str, type] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,  # from 1 in each row; 0 is padding; attention stays within one
    "positions": np.int32,  # from 0 in each document, and again in each row that it goes on in
    "weights": np.float32,  # 1 where the target counts, 0 on padding and, of conversations, outside answers
}
