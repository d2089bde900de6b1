"""A worker's process: it owns the staging memory of one engine rank (on GPUs: of one GPU) and moves its bytes.

The supervisor starts it as `main`. `loop` is its control thread: it holds the protocol cores and carries out what they ask
for. `engine_requests` answers the engine. `moving` makes slabs of the cores' effects, and the pipeline runs their lives with
what `parts` has made: transport, staging memory, copier and runner. `peer_book` knows peers, `neighbour_pools` maps the pools
of other ranks of this node. `polling` says how soon the loop looks again, `gc_policy` when Python collects garbage, `health` when this
process must be replaced, `status` reports its state. `config` holds its orders, which is all that its supervisor knows of this
package.
"""
