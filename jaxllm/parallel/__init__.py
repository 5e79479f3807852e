"""Device meshes, the sharding of every array on them, and the collectives between their devices."""
