"""The protocol between engines and agents: layouts, plans, messages, and the protocol cores. `session` describes the cores.

Pure: no I/O, no clock, no torch.
"""
