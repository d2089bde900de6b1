"""What a deployment is: manifest, config file, pods, conditions. Imported by the agent, the operator and the command line.

Pure: no I/O, no clock.
"""
