"""Shows the rooms of running agents: `longshore rooms`, and `longshore trace room ID` for the timeline of one.

`command` parses the arguments, asks the agents and prints. `listing` makes the table of rooms; `clocks` aligns the hosts,
`steps` joins the agents' answers, and `timeline` renders them as a table and as a file. Needs no module of the agent.
"""

from __future__ import annotations

from longshore_cli.rooms.command import add_rooms_arguments, add_trace_arguments, show_rooms, trace

__all__ = ["add_rooms_arguments", "add_trace_arguments", "show_rooms", "trace"]
