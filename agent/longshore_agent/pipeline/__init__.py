"""The life of a slab in a worker, and who runs it. Begin with `life`."""
