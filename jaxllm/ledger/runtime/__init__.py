"""Ledger of a run: printed before it starts, checked against measurements, and used to explain out-of-memory errors."""

# A change suggested after an out-of-memory error must lower the predicted peak to this fraction: the prediction may
# have been that the run fits.
OOM_TARGET = 0.8
