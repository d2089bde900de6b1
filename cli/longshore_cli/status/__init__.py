"""Shows deployments and agents: `longshore status`, as one line for each deployment or as a tree, with rates.

`command` parses the arguments and prints; `reading` asks the cluster and the agents; `report` holds what an agent says and
makes rates; `facts` joins both and names the worst; `shown` renders, and `live` draws again and again. `longshore up` uses
`report`, `shown` and `live` for its view. Needs no module of the agent.
"""

from __future__ import annotations

from longshore_cli.status.command import add_arguments, run

__all__ = ["add_arguments", "run"]
