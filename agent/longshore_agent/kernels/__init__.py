"""Copies between an engine's pages and a slab of staging memory; each has a plain `reference` beside its `launch`."""
