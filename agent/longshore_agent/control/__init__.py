"""Links to peers over ZeroMQ, and the socket on which engines of this node connect. The only place that knows zmq."""
