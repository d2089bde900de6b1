"""The protocol between Longshore processes: layouts, plans, messages, and the protocol cores.

Imported by the client, the agent, the operator and the command line. Pure: no I/O, no clock, no torch.
"""
