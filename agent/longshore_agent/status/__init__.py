"""Status of an agent: metrics, spans, snapshots, checks, and the HTTP pages that show them."""
