"""The manifests in `examples/`, for tests that apply them in namespaces of their own."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml
from deployments import ROOT

EXAMPLES = ROOT / "examples"
Body = dict[str, Any]


def example(name: str) -> list[Body]:
    """Return the objects of a file."""
    return [entry for entry in yaml.safe_load_all((EXAMPLES / name).read_text()) if entry]


def moved(body: Body, namespace: str) -> Body:
    """Return an example's object, changed to another namespace and to this test's own nodes."""
    text = json.dumps(body).replace("/run/longshore/default/", f"/run/longshore/{namespace}/")
    for role in ("prefill", "decode"):
        text = text.replace(f'"longshore.dev/role": "{role}"', f'"longshore.dev/role": "{namespace}-{role}"')
    found: Body = json.loads(text)
    found["metadata"]["namespace"] = namespace
    return found


def pods(name: str, namespace: str) -> dict[str, Body]:
    """Return the pod of each Deployment of a file, by the Deployment's name."""
    found = [moved(body, namespace) for body in example(name) if body["kind"] == "Deployment"]
    return {body["metadata"]["name"]: pod_of(body) for body in found}


def pod_of(controller: Body) -> Body:
    """Return the pod that a controller creates."""
    template = controller["spec"]["template"]
    metadata = {**template["metadata"], "name": controller["metadata"]["name"]}
    metadata["namespace"] = controller["metadata"]["namespace"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def without_settings(pod: Body) -> Body:
    """Return an example's pod without the settings that the injection adds."""
    found = copy.deepcopy(pod)
    spec = found["spec"]
    del spec["securityContext"]["supplementalGroups"]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "longshore"]
    for container in spec["containers"]:
        del container["envFrom"]
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "longshore"]
    return found
