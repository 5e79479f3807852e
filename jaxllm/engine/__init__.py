"""Host side of text generation: turns requests into text with the jitted programs of `decode`."""
