"""The control plane: creates the agents of each DisaggDeployment and reports their state in its status.

Imports no tensor library. The folder above has no `__init__.py`, because a package named `operator` would hide the
standard library's module of that name.
"""
