"""A worker's process: it owns the staging memory of one engine rank (on GPUs: of one GPU) and moves its bytes.

The supervisor starts it as `main`. `loop` is its control thread: it holds the protocol cores and applies their effects.
`engine_requests` answers the engine. `moving` makes slabs of effects, and the pipeline moves them with the transport,
staging memory, copier and runner that `resources` has made. `neighbour_pools` maps pools of other ranks of this node. `polling` sets the loop's sleep, `gc_policy` times garbage collection, `health` decides when
this process must be replaced, and `status` reports its state. The supervisor imports only `config`, a worker's orders.
"""
