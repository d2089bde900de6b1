"""A worker's process: it owns the staging memory of one engine rank (on GPUs: of one GPU) and moves its bytes.

The supervisor starts it as `main`. `loop` is its control thread: it holds the protocol cores and carries out what they
ask for, with `moving`, which has the jobs under way, `parts`, which has the transport, the staging memory and what does
the jobs on a CPU or on a GPU, `peer_book`, which knows peers and wires, and `near_writes`, which has the pools of
neighbours on this node. `pace` says how soon the loop looks again, `heap` when Python looks for garbage, `health`
when this process must be replaced, `status` what it answers when it is asked how it is. `config` is what it is told at its
start, and all of this package that its supervisor knows. The stages through which the bytes themselves go are in `path`,
the links in `control`.
"""
