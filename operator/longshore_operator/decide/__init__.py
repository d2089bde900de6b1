"""Decides which objects to write and which conditions to report. Pure: no clock, I/O, kopf or kubernetes."""
