"""A small real inference engine: paged KV in shared memory or on GPUs, tensor parallel over processes, greedy decoding.

The demo and the tests drive it where a user has vLLM or SGLang. It knows nothing of agents or transfers:
whoever moves KV hands it page ids and finds the memory by `PagePool.region_fd` and `PagePool.geometry`.
That is `connector`, an extension of its processes; it and `device_memory` alone import the client.
`config`, `pages`, `commands`, `connector` and `processes` load without torch; the rest computes.
"""
