"""The table of a deployment's conditions and their reasons: the meaning and remedy of each.

The operator gives no other reasons, `longshore check` prints the remedies, and the reference page is generated from this
table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class ConditionType(StrEnum):
    """The conditions of a deployment, in the order in which its status lists them."""

    READY = "Ready"
    COMPATIBLE = "Compatible"
    AGENTS_READY = "AgentsReady"
    ENGINES_CONNECTED = "EnginesConnected"
    PEERS_CONNECTED = "PeersConnected"
    TRANSPORT_VERIFIED = "TransportVerified"
    NODES_SHARED = "NodesShared"
    DEFINITION_MATCHES = "DefinitionMatches"
    PROGRESSING = "Progressing"


class Truth(StrEnum):
    """The status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """One row.

    Attributes:
        remedy: empty if there is nothing to do.
        echo: it follows from another condition, which has the cause and the event.
    """

    condition: ConditionType
    name: str
    truth: Truth
    meaning: str
    remedy: str = ""
    echo: bool = False


MEANINGS = {
    ConditionType.READY: "Engines may use it: Compatible and AgentsReady are True for the current generation.",
    ConditionType.COMPATIBLE: "The declared layouts can exchange pages, and their plan is in the status.",
    ConditionType.AGENTS_READY: (
        "Every ready node that a selector picks, and whose taints agents tolerate, runs a ready agent of the current "
        "generation. Each role has one."
    ),
    ConditionType.ENGINES_CONNECTED: "As many engine instances as expected have registered all of their ranks.",
    ConditionType.PEERS_CONNECTED: "All peers that workers know are attached.",
    ConditionType.TRANSPORT_VERIFIED: "The wire that carries the bytes is known and allowed.",
    ConditionType.NODES_SHARED: "Agents of another deployment run on the same nodes and take memory there.",
    ConditionType.DEFINITION_MATCHES: (
        "The CRD and the operator know the same fields. A field that one of them does not know is ignored."
    ),
    ConditionType.PROGRESSING: "The operator or the cluster is still applying the current generation.",
}

_T, _F, _U = Truth.TRUE, Truth.FALSE, Truth.UNKNOWN
_C = ConditionType
_SILENT = "An agent that was ready has not responded for 30 s. This condition cannot be determined."
_SEE_NETWORK = (
    "Check the agents on the nodes that the message names, and NetworkPolicies and routes to their HTTP port."
)
_START_ENGINES = "Start the engines. Until then `longshore verify` moves test bytes between the agents."
_SEND = "Send a request through both engines: they connect with the first one."

TABLE = (
    Reason(_C.READY, "Ready", _T, "Compatible and AgentsReady are True."),
    Reason(
        _C.READY, "Incompatible", _F, "Compatible is False.", "See the reason and message of Compatible.", echo=True
    ),
    Reason(
        _C.READY,
        "AgentsNotReady",
        _F,
        "AgentsReady is not True.",
        "See the reason and message of AgentsReady.",
        echo=True,
    ),
    Reason(_C.COMPATIBLE, "PlanMade", _T, "The two layouts have a plan."),
    Reason(
        _C.COMPATIBLE,
        "InvalidSpec",
        _F,
        "The spec has a contradiction that the API server cannot detect. Agents are not changed.",
        "Correct the fields that the message names.",
    ),
    Reason(
        _C.COMPATIBLE,
        "NotAllowed",
        _F,
        "The spec asks for more than the cluster's administrator allows. Agents are not changed.",
        "Leave out the fields that the message names, or have the administrator set its values of the chart.",
    ),
    Reason(_C.AGENTS_READY, "AllAgentsReady", _T, "Every agent is ready and runs the current spec."),
    Reason(_C.AGENTS_READY, "AgentsUpdating", _F, "Agents are being started or replaced."),
    Reason(
        _C.AGENTS_READY,
        "AgentsNotReady",
        _F,
        "Agents cannot be created, do not start, or run and are not ready.",
        "Remove the cause that the message gives for each node. For more: `kubectl describe daemonsets,pods -l longshore.dev/deployment=<name>`.",
    ),
    Reason(
        _C.AGENTS_READY,
        "AgentsOutdated",
        _F,
        "Agents run an older spec and are not replaced: agents.updateStrategy is OnDelete, or they read an older config.",
        "Delete their pods when their nodes may be without an agent.",
    ),
    Reason(
        _C.AGENTS_READY,
        "Paused",
        _F,
        "The spec is paused, and the cluster does not match it.",
        "Set spec.paused to false.",
    ),
    Reason(
        _C.AGENTS_READY,
        "NoNodes",
        _F,
        "No node has the labels of a role's selector.",
        "Label nodes to match nodeSelector, or change it.",
    ),
    Reason(
        _C.AGENTS_READY,
        "NodesTainted",
        _F,
        "Every node that a role's selector picks has a taint that the agents do not tolerate. An agent that runs counts until a "
        "taint with NoExecute ends it.",
        "Tolerate the taint of the message in agents.tolerations, or remove it.",
    ),
    Reason(
        _C.AGENTS_READY,
        "NodesNotReady",
        _F,
        "No node that a role's selector picks is ready.",
        "Check the nodes of the message.",
    ),
    Reason(
        _C.AGENTS_READY,
        "SpecNotApplied",
        _F,
        "The spec is incompatible: agents run an older spec, or none was started.",
        "See Compatible.",
        echo=True,
    ),
    Reason(
        _C.AGENTS_READY,
        "ChildRefused",
        _F,
        "The API server refused an object that the agents need, or another object has its name.",
        "Change what the response in the message refuses, such as by a quota or an admission policy. Delete or rename the other object.",
    ),
    Reason(
        _C.AGENTS_READY,
        "RequestsFail",
        _F,
        "Requests of the operator to the API server have failed for at least 8 s.",
        "Remove the cause of the response in the message, such as an admission webhook that does not answer. The operator retries.",
    ),
    Reason(_C.ENGINES_CONNECTED, "EnginesConnected", _T, "All expected engine instances have registered."),
    Reason(
        _C.ENGINES_CONNECTED,
        "EnginesMissing",
        _F,
        "Fewer engine instances have registered than `instances` says.",
        "Check the engines' pods and logs: one that an agent refuses would be named here.",
    ),
    Reason(
        _C.ENGINES_CONNECTED,
        "EnginesFailing",
        _F,
        "A role has fewer engine instances than `instances` says, or none, and a pod with the label `longshore.dev/inject` for "
        "it is not scheduled, does not start or crashes.",
        "Remove the cause that the message gives for each pod. For more: `kubectl describe pod <pod>`, and the pod's log.",
    ),
    Reason(
        _C.ENGINES_CONNECTED,
        "EnginesRefused",
        _F,
        "An agent has refused an engine in the last 10 minutes: its layout is not the declared one, or its client is of another "
        "release.",
        "Change the field that the message names at the engine, or in the deployment.",
    ),
    Reason(
        _C.ENGINES_CONNECTED,
        "RanksMissing",
        _F,
        "An instance has registered only some of its ranks.",
        "Wait for it, or check the logs of the missing ranks.",
    ),
    Reason(_C.ENGINES_CONNECTED, "NoEngines", _U, "No engine has registered yet.", _START_ENGINES),
    Reason(_C.ENGINES_CONNECTED, "AgentSilent", _U, _SILENT, _SEE_NETWORK),
    Reason(_C.PEERS_CONNECTED, "PeersConnected", _T, "Every peer that a worker knows is attached."),
    Reason(_C.PEERS_CONNECTED, "PeersConnecting", _F, "Workers are attaching to each other."),
    Reason(
        _C.PEERS_CONNECTED,
        "PeersLost",
        _F,
        "A worker has lost or refused a peer.",
        "`longshore status <name>` shows the error of the peer that the message names: remove its cause.",
    ),
    Reason(
        _C.PEERS_CONNECTED,
        "NoPeers",
        _U,
        "Engines have registered, but no worker has a peer yet: nothing was sent.",
        _SEND,
    ),
    Reason(_C.PEERS_CONNECTED, "NoEngines", _U, "No engine has registered yet.", _START_ENGINES),
    Reason(_C.PEERS_CONNECTED, "AgentSilent", _U, _SILENT, _SEE_NETWORK),
    Reason(
        _C.TRANSPORT_VERIFIED,
        "WireVerified",
        _T,
        "The wire of every attached peer that needs one is known and allowed.",
    ),
    Reason(
        _C.TRANSPORT_VERIFIED,
        "WireNotAllowed",
        _F,
        "The wire of peers is not in transfer.wires: their rooms fail before any byte is sent.",
        "Make an allowed wire reachable for both agents (its NIC or GPUs), or allow the wire in the message.",
    ),
    Reason(
        _C.TRANSPORT_VERIFIED,
        "WireUnknown",
        _U,
        "A peer is attached, but the wire of its bytes is not known yet.",
        "Wait some seconds. If it stays, `longshore status` shows the error of the peer.",
    ),
    Reason(_C.TRANSPORT_VERIFIED, "NoPeers", _U, "No peer is attached yet.", _SEND),
    Reason(_C.TRANSPORT_VERIFIED, "NoEngines", _U, "No engine has registered yet.", _START_ENGINES),
    Reason(_C.TRANSPORT_VERIFIED, "AgentSilent", _U, _SILENT, _SEE_NETWORK),
    Reason(
        _C.NODES_SHARED,
        "NodesShared",
        _T,
        "Agents of another deployment run on the same nodes.",
        "Check that the GPUs have memory for the total staging per rank in the message.",
    ),
    Reason(_C.NODES_SHARED, "NodesOwn", _F, "No other deployment's agents run on these nodes."),
    Reason(
        _C.DEFINITION_MATCHES,
        "FieldsKnown",
        _T,
        "The operator knows each field of the spec, and the CRD each of the status.",
    ),
    Reason(
        _C.DEFINITION_MATCHES,
        "FieldsUnknown",
        _F,
        "The CRD is of another release than the operator. The fields of the message have no effect, or are not shown.",
        "Upgrade the operator, or apply the CRD of its release: "
        "`kubectl apply --server-side --force-conflicts -f crds/`. An upgrade by Helm does both.",
    ),
    Reason(_C.PROGRESSING, "RollingOut", _T, "Agents are being started, replaced or removed."),
    Reason(_C.PROGRESSING, "Settled", _F, "The cluster matches the spec."),
    Reason(_C.PROGRESSING, "Paused", _U, "The spec is paused: nothing is created, changed or deleted."),
    Reason(
        _C.PROGRESSING,
        "Blocked",
        _F,
        "Nothing more happens until the spec or the cluster changes.",
        "See Compatible and AgentsReady.",
        echo=True,
    ),
)

_BY_NAME = {(row.condition, row.name): row for row in TABLE}
assert len(_BY_NAME) == len(TABLE), "duplicate reason"


# The conditions that are not True while all is well.
_GOOD = {"NodesShared": "False", "Progressing": "False"}


def is_good(condition: str, status: str, reason: str) -> bool:
    """Whether a condition of a DisaggDeployment says that all is well."""
    # A rollout that is blocked makes no progress either.
    return status == _GOOD.get(condition, "True") and reason != "Blocked"


def reason(condition: ConditionType, name: str) -> Reason:
    """Return the row of a reason. Asserts that the table has it."""
    assert (condition, name) in _BY_NAME, (condition, name)
    return _BY_NAME[condition, name]


def remedy(condition: str, name: str) -> str:
    """Return what to do about a reason, by the words of a status; empty: nothing, or the table does not have it."""
    row = next((row for row in TABLE if (row.condition.value, row.name) == (condition, name)), None)
    return row.remedy if row else ""


def is_known(condition: ConditionType, name: str) -> bool:
    """Whether the table has this reason. A status may have one of another version of the operator."""
    return (condition, name) in _BY_NAME


def reference() -> str:
    """Return the tables of the reference page as Markdown. Rows that conditions share come once, at the end."""
    rows = [(row, f"| `{row.name}` | {row.truth.value} | {row.meaning} | {row.remedy} |") for row in TABLE]
    shared = {text for text, count in Counter(text for _, text in rows).items() if count > 1}
    head = ["", "| reason | status | meaning | what to do |", "|---|---|---|---|"]
    parts = []
    for condition in ConditionType:
        own = [text for row, text in rows if row.condition is condition and text not in shared]
        parts += [f"## {condition.value}", "", MEANINGS[condition], *head, *own, ""]
    named = dict.fromkeys(row.condition.value for row, text in rows if text in shared)
    parts += [f"## {', '.join(named)}", "", "Each of these conditions also has these reasons.", *head]
    return "\n".join([*parts, *dict.fromkeys(text for _, text in rows if text in shared)])
