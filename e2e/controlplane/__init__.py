"""Runs a real Kubernetes control plane on loopback: etcd, API server, controller-manager, scheduler, and KWOK nodes on demand.

Used by the fixtures of `e2e/conftest.py`, by `benchmarks/operator_scale.py` and by the command `python -m controlplane`.
"""
