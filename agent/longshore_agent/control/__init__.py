"""Links to peers over ZeroMQ, and the socket for engines of this node. The only package that imports zmq."""
