"""Opens the pages of the agents that a command's arguments name: of a deployment, of a `longshore up`, or at addresses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from longshore_cli import cluster, up_directory
from longshore_cli.arguments import ArgumentsError
from longshore_cli.cluster import CONNECTIONS, Cluster
from longshore_cli.status_pages import AgentPageError, AgentPages
from longshore_cli.threads import Threads
from longshore_cli.words import plain
from longshore_wire.errors import LongshoreError

# For one page of each of 1,000 agents, which takes some seconds. One that does not answer takes HTTP_TIMEOUT_S.
PAGES_LIMIT_S = 20.0

_Answer = TypeVar("_Answer")


def add_arguments(
    parser: argparse.ArgumentParser, what: str = "agents of this DisaggDeployment (of all of the namespace)"
) -> None:
    """Declare what `opened` reads."""
    parser.add_argument("deployment", metavar="NAME", nargs="?", default="", help=what)
    cluster.add_arguments(parser)
    one = parser.add_argument_group("agents without a cluster")
    up_directory.add_argument(one)
    one.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="URL",
        help="an agent's address, as its agent.json has it; give it again for each further agent",
    )
    one.add_argument("--token-file", type=Path, help="file with the token of these agents' pages")
    one.add_argument("--authority", type=Path, help="PEM file of the authority of these agents' certificates")


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Sequence[AgentPages]]:
    """Open the pages of all agents that the arguments name, at least one.

    Raises:
        ArgumentsError: the arguments contradict each other.
        AgentPageError: there is no agent.
        DirectoryError: the directory is none of a `longshore up`.
        ClusterError: the cluster does not answer.
    """
    with ExitStack() as stack:
        found = without_cluster(arguments, stack)
        if found is None:
            found = _of_deployment(stack.enter_context(Cluster.connect(arguments)), arguments.deployment)
        yield found


def without_cluster(arguments: argparse.Namespace, stack: ExitStack) -> Sequence[AgentPages] | None:
    """Return the pages of the agents that --agent or --directory names, which `stack` closes; None: neither is given.

    Raises:
        ArgumentsError: the arguments contradict each other.
        AgentPageError: an address is none of an agent.
        DirectoryError: the directory is none of a `longshore up`.
    """
    if not arguments.agent and arguments.directory is None:
        if arguments.token_file or arguments.authority:
            raise ArgumentsError("--token-file and --authority are for agents without a cluster: give --agent")
        return None
    if arguments.agent and arguments.directory is not None:
        raise ArgumentsError("--agent and --directory both name agents: give one of them")
    if arguments.deployment or arguments.namespace or arguments.context or arguments.kubeconfig:
        given = "--agent" if arguments.agent else "--directory"
        raise ArgumentsError(f"{given} names agents without a cluster: leave out the deployment, or {given}")
    token, authority = _token(arguments.token_file), arguments.authority
    if arguments.agent:
        urls = dict.fromkeys(url.rstrip("/") for url in arguments.agent)
        found = [AgentPages.at(url, token=token, authority=authority) for url in urls]
    else:
        members = up_directory.members(arguments.directory)
        found = [member.pages(token=token, authority=authority) for member in members]
    return [stack.enter_context(pages) for pages in found]


def asked(command: str, pages: Sequence[AgentPages], ask: Callable[[AgentPages], _Answer]) -> list[_Answer]:
    """Return the answers of the agents that answer, in their order; complain about the others on the error output."""
    found = answers(pages, ask)
    for each in found:
        if isinstance(each, LongshoreError):
            sys.stderr.write(f"longshore {command}: {plain(str(each))}\n")
    return [each for each in found if not isinstance(each, LongshoreError)]


def answers(
    pages: Sequence[AgentPages], ask: Callable[[AgentPages], _Answer], limit_s: float | None = None
) -> list[_Answer | LongshoreError]:
    """Return the answer of each agent, or why it has none, in their order. At most `CONNECTIONS` are asked at once.

    Args:
        limit_s: agents that have not answered by then are given up; None: all are asked.
    """
    with Threads(CONNECTIONS) as threads:
        futures = [threads.submit(ask, one) for one in pages]
        threads.finish(limit_s)
    found: list[_Answer | LongshoreError] = []
    for one, future in zip(pages, futures, strict=True):
        if future.cancelled() or not future.done():
            found.append(AgentPageError(f"the agent at {one.name} has not answered within {limit_s:g} s"))
            continue
        error = future.exception()
        if error is not None and not isinstance(error, LongshoreError):
            raise error
        found.append(future.result() if error is None else error)
    return found


def _of_deployment(found: Cluster, deployment: str) -> Sequence[AgentPages]:
    pods = found.agents(deployment)
    if not pods:
        if deployment:
            found.deployment(deployment)
        whose = f"DisaggDeployment {deployment}" if deployment else f"namespace {found.namespace}"
        raise AgentPageError(f"{whose} has no pods of agents: `kubectl describe dgdep -n {found.namespace}` says why")
    return [found.pages(pod) for pod in pods]


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentsError(f"--token-file {path}: {error}: name the file with the agents' token") from error
    if not token or not token.isprintable():
        raise ArgumentsError(f"--token-file {path} is empty or has several lines: name the file with the agents' token")
    return token
