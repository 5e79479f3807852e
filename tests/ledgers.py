"""Checks of the JSON of a ledger."""


def peak(value):
    """Returns the peak that the rows of a ledger's JSON add up to: persistent bytes and the largest phase."""
    sums = {}
    for row in value["rows"]:
        sums[row["phase"]] = sums.get(row["phase"], 0) + row["bytes_per_device"]
    persistent = sums.pop("persistent", 0)
    sums.pop("host memory", None)
    return persistent + max(sums.values(), default=0)
