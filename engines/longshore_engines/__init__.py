"""Connects inference engines to the client.

`vllm` and `vllm_stats` import vLLM, and only vLLM imports them. `sglang`, `sglang_decode`, `sglang_manager` and
`sglang_prefill` import SGLang, and only SGLang imports them. The other modules import no engine.
"""
