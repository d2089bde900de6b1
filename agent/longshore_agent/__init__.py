"""The data plane of a node: staging memory, gather and scatter, transfers, health."""
