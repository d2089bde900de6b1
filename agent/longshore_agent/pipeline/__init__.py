"""Moves slabs: `life` says what happens to one slab, `runners` runs the lives of all. Start reading at `life`."""
