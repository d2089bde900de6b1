"""The test engine of `longshore verify` and `longshore bench cluster`: `python -m longshore_lab.test_engine`.

The command runs it beside an agent, in the agent's pod by `exec`, because engines reach their agent by a UNIX socket. The
API server's RBAC guards `exec`, so the agent needs no page that can start a transfer. The test engine talks to the command
by its standard input and output (`longshore_spec.verify_messages`), and ends when its input does, so that a killed command
leaves nothing behind. Its pages are in the memory of the GPUs that the pod sees, or else in host memory.
"""
