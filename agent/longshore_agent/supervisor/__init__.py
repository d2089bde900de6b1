"""The agent's main process: it takes engines in, starts a worker for each rank, and tells workers and people of each other.

`loop` is its one thread beside HTTP's, and says what is done when somebody connects, speaks or dies. It asks `reception`
who may register, `ports` where a worker listens, `slots` to start one and to remember what is known of it, and
`pool_holders` which worker has been given whose pages; `snapshots` carries HTTP's questions to it. It moves no bytes and
knows no rooms: that is the workers' business, in `worker`, to which it speaks by `control.node_link`.
"""
