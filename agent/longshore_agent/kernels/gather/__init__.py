"""From an engine's pages into a slab."""
