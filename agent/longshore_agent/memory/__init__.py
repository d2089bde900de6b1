"""The memory that a worker maps: engines' pages (`pools`), its own staging buffers (`staging`) and how both are mapped (`ipc`)."""
