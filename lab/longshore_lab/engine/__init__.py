"""A small real inference engine: paged KV in shared memory or on GPUs, tensor parallel over processes, greedy decoding.

The demo and the tests run it in place of vLLM or SGLang. It does not know agents or transfers. The code that moves KV
passes page ids to it and finds the memory by `PagePool.memory` and `PagePool.geometry`: that is `connector`, an
extension of its processes. Its pool and its calls of the agent are the test engine's.
`config`, `pages`, `commands`, `connector` and `processes` do not load torch; the other modules do.
"""
