"""The test engine: plays an engine without a model. It moves known content of one or several caches and compares every byte.

`longshore verify`, `longshore bench`, the soak and tests of agents are made of `pages`, `memory` and `ranks`. `longshore
verify` and `longshore bench cluster` run the program `python -m longshore_lab.test_engine` beside an agent, in the agent's
pod by `exec`, because engines reach their agent by a UNIX socket. The API server's RBAC guards `exec`, so the agent needs no
page that can start a transfer. The program talks to the command by its standard input and output
(`longshore_spec.verify_messages`), and ends when its input does, so that a killed command leaves nothing behind. Its pages
are in the memory of the GPUs that the pod sees, or else in host memory.

It needs numpy, which agents have, and no tensor library.
"""
