"""Connectors: what makes an inference engine a user of the client.

`vllm` and `vllm_stats` import vLLM and are imported by it alone; the other modules know no engine.
"""
