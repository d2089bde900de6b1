"""From a checked spec to the objects that a deployment consists of. Pure: equal input, equal output, byte by byte."""
