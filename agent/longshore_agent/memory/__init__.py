"""A worker's memory: engines' pages (`pools`), and its own staging buffers, on a CPU (`host_memory`) or a GPU (`device_memory`)."""
