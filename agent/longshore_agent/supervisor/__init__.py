"""Runs the agent's main process, which accepts engines, starts workers, and passes messages to and from HTTP.

`loop` is its only thread besides HTTP's, and handles connections, messages and ends of processes. `callers` holds
connections before their Hello, `reception` checks each Hello, `lives` keeps ports and epochs, `slots` starts workers
and keeps their state, `pool_broker` carries pools between workers, and `snapshots` passes HTTP's requests to the
loop. The supervisor moves no bytes. Workers, in `worker`, handle rooms; the link to them is `control.node_link`.
"""
