"""What an agent says of itself: metrics, spans, snapshots, checks, and the HTTP that shows them."""
