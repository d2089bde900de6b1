"""What two Longshore processes must agree on: layouts, plans, messages, and the cores that obey them.

Imported by the client, the agent, the operator and the command line. Pure: no I/O, no clock, no torch.
"""
