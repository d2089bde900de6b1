"""A worker's memory: engines' pages (`pools`), its own staging buffers (`staging`), and the mapping of both (`ipc`)."""
