"""Arrays known to the byte: parameters, optimizer state, saved activations and their layout on devices."""
