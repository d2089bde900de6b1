"""A real Kubernetes control plane on loopback: etcd, API server, controller-manager, scheduler and, on demand, KWOK nodes.

Used by the fixtures of `e2e/conftest.py`, by `benchmarks/operator_scale.py` and by people: `python -m controlplane`.
"""
