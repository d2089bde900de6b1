"""A small real inference engine: paged KV in shared memory or on GPUs, tensor parallel over processes, greedy decoding.

The demo and the tests run it in place of vLLM or SGLang. It does not know agents or transfers. The code that moves KV
passes page ids to it and finds the memory by `PagePool.region_fd` and `PagePool.geometry`: that is `connector`, an
extension of its processes. Only `connector` and `device_memory` import the client.
`config`, `pages`, `commands`, `connector` and `processes` do not load torch; the other modules do.
"""
