"""From what was observed to what is to be done and said. Pure: no clock, no I/O, no kopf, no kubernetes."""
