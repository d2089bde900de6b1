"""The commands `longshore rooms` and `longshore trace`: ask agents for their rooms, and print and write the answers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from longshore_cli import agents
from longshore_cli.arguments import new_file, whole
from longshore_cli.rooms import listing, timeline
from longshore_cli.rooms.clocks import Correction, Exchange, Host, corrections
from longshore_cli.rooms.steps import cut_workers, joined
from longshore_cli.status_pages import AgentPageError, AgentPages, Answer, UnknownRoomError
from longshore_wire.names import ROOM_NAME, room_name

# Requests to each agent. An answer lacks a worker that got no processor for a while, so the one with most spans counts.
REQUESTS = 2
# If hosts have several clocks: the request with the shortest round trip aligns a clock. One often waits for a thread.
CLOCK_REQUESTS = 8
# Of one page of `/v1/rooms`.
_PAGE_ROOMS_MAX = 1000
_NS_PER_US = 1000
_ROOM_END = 1 << 64


def add_rooms_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `show_rooms` reads."""
    agents.add_arguments(parser)
    parser.add_argument("--limit", type=whole(1), default=100, help="rooms of each agent, lowest numbers first (100)")
    parser.add_argument("--ended", choices=("true", "false"), help="show only ended rooms, or only open ones")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="the format (table)")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `trace` reads."""
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    room = subjects.add_parser("room", help="the timeline of one room in all its processes")
    room.add_argument(
        "room", type=_name, metavar="ID", help="the room's number, or its name as `longshore rooms` and logs have it"
    )
    agents.add_arguments(room)
    room.add_argument("--instance", help="the prefill instance, if several have a room of this number")
    room.add_argument("-o", "--output", type=new_file, help="write the timeline to this file, for ui.perfetto.dev")


def show_rooms(arguments: argparse.Namespace) -> int:
    """Print the rooms of all agents that answer; return 0, or 1 if one does not. Raises LongshoreError."""
    with agents.opened(arguments) as pages:
        found = agents.asked(
            "rooms", pages, lambda agent: (agent.name, _rooms(agent, arguments.limit, arguments.ended))
        )
        if found:
            print(listing.as_json(found) if arguments.output == "json" else listing.table(found))
        return int(len(found) < len(pages))


def trace(arguments: argparse.Namespace) -> int:
    """Print the timeline of a room and write its file; return 0. Raises LongshoreError, also if there is none."""
    with agents.opened(arguments) as pages:
        details, hosts = _asked(pages, arguments.room, arguments.instance)
    shifts = corrections(hosts)
    steps, cut = joined(details, shifts), cut_workers(details)
    print(timeline.table(steps, cut))
    for line in _alignment(details, shifts):
        print(line)
    if arguments.output:
        timeline.write(steps, arguments.output, cut)
        print(f"wrote {arguments.output}: open it at ui.perfetto.dev")
    return 0


def _rooms(agent: AgentPages, limit: int, ended: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while len(found) < limit:
        query: dict[str, str | int] = {"limit": min(_PAGE_ROOMS_MAX, limit - len(found)), "after": after}
        asked = query | ({"ended": ended} if ended else {})
        page = agent.page("/v1/rooms", asked, fields=("rooms", "next"))
        assert page is not None, "only a single room can be unknown"
        found += page[0]["rooms"]
        after = page[0]["next"]
        if not after:
            break
    return found


def _name(text: str) -> str:
    """Return a room's name. Whoever sees a request to an agent must not learn the room's number."""
    if text.isdecimal() and int(text) < _ROOM_END:
        return room_name(int(text))
    if not text.isdecimal() and re.fullmatch(ROOM_NAME, text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: give a number below 2**64, or a name as `longshore rooms` shows it")


def _asked(pages: Sequence[AgentPages], room: str, instance: str | None) -> tuple[list[dict[str, Any]], list[Host]]:
    """Return the answers of the agents that know a room, and the clocks of their hosts. Raises UnknownRoomError."""
    path, query = f"/v1/rooms/{room}", {"instance": instance} if instance else None

    def ask(agent: AgentPages, count: int) -> list[tuple[dict[str, Any], Answer]]:
        found = [agent.page(path, query, fields=("halves", "spans", "incomplete")) for _ in range(count)]
        return [each for each in found if each is not None]

    known = {}
    answered = agents.asked("trace", pages, lambda agent: (agent, ask(agent, REQUESTS)))
    for agent, answers in answered:
        if answers:
            # One agent may have been named by two addresses.
            known[frozenset(entry["worker"] for body, _ in answers for entry in body["halves"])] = agent, answers
    if not known:
        raise UnknownRoomError(
            f"room {room} is unknown to {', '.join(agent.name for agent, _ in answered) or 'every agent'}: `longshore rooms` lists those that an agent "
            "keeps; name the agents of its prefill and decode instances, with --instance only a prefill instance"
        )
    hosts = [_host(*each) for each in known.values()]
    if not all(host.boot_id and host.boot_id == hosts[0].boot_id for host in hosts):
        for agent, answers in known.values():
            answers.extend(ask(agent, CLOCK_REQUESTS - REQUESTS))
        hosts = [_host(*each) for each in known.values()]
    details = [max((body for body, _ in answers), key=lambda body: len(body["spans"])) for _, answers in known.values()]
    return details, hosts


def _host(agent: AgentPages, answers: Sequence[tuple[dict[str, Any], Answer]]) -> Host:
    exchanges, boot_id = [], ""
    for body, answer in answers:
        clock = body.get("clock")
        if clock is None:
            raise AgentPageError(f"the agent at {agent.name} does not tell its clock: update it to this release")
        boot_id = str(clock["boot_id"])
        exchanges.append(Exchange(answer.sent_ns, int(clock["received_ns"]), int(clock["answered_ns"]), answer.got_ns))
    return Host(boot_id, exchanges)


def _alignment(details: Sequence[dict[str, Any]], shifts: Sequence[Correction]) -> list[str]:
    """Return what is known about the clocks of these answers."""
    if not any(shift.uncertainty_ns for shift in shifts):
        return ["all times are of one clock"]
    lines = []
    for detail, shift in zip(details, shifts, strict=True):
        workers = ", ".join(sorted({entry["worker"] for entry in detail["halves"]}))
        if shift.uncertainty_ns:
            lines.append(
                f"the clock of {workers} was aligned by {shift.shift_ns / _NS_PER_US:.1f} us, and is at most "
                f"{shift.uncertainty_ns / _NS_PER_US:.1f} us wrong now; clocks drift apart, so trace a room soon after its end"
            )
    return lines
