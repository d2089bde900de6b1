"""The control plane: turns a DisaggDeployment into agents and reports the truth in its status.

Imports no tensor library. The folder above has no `__init__.py`, because a package named `operator` would hide the
standard library's module of that name.
"""
