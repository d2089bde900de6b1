"""From a slab into an engine's pages."""
