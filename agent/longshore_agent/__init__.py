"""The node's data plane: staging memory, gather and scatter, transfers, health."""
