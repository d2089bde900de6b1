"""What a deployment is: manifest, config file, pods, conditions. Imported by the agent, the operator and the command line.

Pure: no clock, and no I/O, except that `distribution` reads the metadata of the installed packages.
"""
