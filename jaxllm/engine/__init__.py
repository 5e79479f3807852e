"""Generation on the host: requests in, text out, around the jitted programs of `decode`."""
