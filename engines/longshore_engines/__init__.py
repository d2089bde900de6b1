"""Connects inference engines to the client.

`vllm` and `vllm_stats` import vLLM, and only vLLM imports them. The other modules know no engine.
"""
