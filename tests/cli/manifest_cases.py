"""Manifests that the CRD accepts, those that it refuses, and changes that it refuses. No test is here.

`e2e/test_crd.py` sends them to a real API server, and `test_analyze_faults.py` to `longshore analyze`. Each rule of the CRD has one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longshore_cli.analyze.definition import parse

Body = dict[str, Any]
ROOT = Path(__file__).parents[2]
BASE: Body = {
    "apiVersion": "longshore.dev/v1alpha1",
    "kind": "DisaggDeployment",
    "metadata": {"name": "llama", "namespace": "default"},
    "spec": {
        "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
        "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "prefill"}},
        "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "decode"}},
    },
}


def changed(**paths: object) -> Body:
    """Return the valid manifest with values set at paths of its spec (`__` for the dot), or removed (None)."""
    body: Body = copy.deepcopy(BASE)
    for path, value in paths.items():
        *folders, last = path.split("__")
        place = body["spec"]
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return body


def named(name: str) -> Body:
    body = changed()
    body["metadata"]["name"] = name
    return body


MLA = {"attention": "MLA", "layers": 61, "kvHeads": 1, "headDim": 576, "dtype": "bfloat16"}
MQA = {"attention": "MQA", "layers": 32, "kvHeads": 1, "headDim": 128, "dtype": "float16"}

CACHES: dict[str, Any] = {
    "kv": {"layers": 15, "dtype": "bfloat16", "planes": [{"heads": 2, "width": 256}] * 2},
    "conv": {
        "layers": 45,
        "unit": "Slot",
        "dtype": "bfloat16",
        "planes": [{"heads": heads, "width": 128, "rows": 3} for heads in (16, 16, 64)],
    },
    "window": {"layers": 4, "dtype": "float16", "planes": [{"heads": 8, "width": 64}], "window": 128},
    "index": {"layers": 61, "unit": "Page", "dtype": "uint8", "planes": [{"heads": 1, "width": 132}]},
}


def caches(*names: str, **changes: Any) -> Body:
    """Return a model of these caches, the last one with changed fields, or without those that are None."""
    found = [{"name": name, **CACHES[name]} for name in names]
    found[-1] |= changes
    return {"caches": [{key: value for key, value in each.items() if value is not None} for each in found]}


POD = {
    "gpuAccess": "CDI",
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "labels": {"team": "inference"},
    "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "system-node-critical",
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "resources": {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"memory": "1024Mi", "rdma/hca": 1},
        "claims": [{"name": "gpu", "request": "all"}],
    },
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpus"}],
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "seLinuxOptions": {"type": "container_t"}},
    "volumes": [
        {"name": "conf", "configMap": {"name": "topology"}},
        {"name": "all", "projected": {"sources": [{"secret": {"name": "s"}}], "defaultMode": 256}},
        {"name": "scratch", "emptyDir": {}},
    ],
    "volumeMounts": [{"name": "conf", "mountPath": "/mnt/conf", "subPath": "a", "readOnly": True}],
}

GOOD = {
    "as small as it gets": changed(),
    "the same layouts": changed(decode__tensorParallel=4),
    "decode is the wider one": changed(prefill__tensorParallel=1, decode__tensorParallel=8),
    "more ranks than heads": changed(prefill__tensorParallel=16),
    "neither divides the other": changed(model__kvHeads=24, prefill__tensorParallel=3, decode__tensorParallel=2),
    "other pages": changed(decode__pageSize=1, decode__pageOrder="HND"),
    "opaque pages": changed(prefill__pageOrder="Opaque", decode__pageOrder="Opaque"),
    "a latent": changed(model=MLA, prefill__tensorParallel=4),
    "a staged latent": changed(model=MLA, prefill__tensorParallel=1, transfer__staging="Always"),
    "one head": changed(model=MQA, prefill__tensorParallel=2),
    "several caches": changed(model=caches(*CACHES)),
    "a state alone, whatever the order of pages": changed(model=caches("conv"), prefill__pageOrder="Opaque"),
    "a state alone": changed(model=caches("conv"), prefill__tensorParallel=8, decode__tensorParallel=2),
    "more ranks than heads of a cache": changed(model=caches("conv", "kv"), prefill__tensorParallel=8),
    "pipelines": changed(prefill__pipelineParallel=4, decode__pipelineParallel=2),
    "data parallel": changed(decode__dataParallel=8),
    "slices need no ring": changed(transfer__staging="Never", decode__staging={"poolSize": "16Mi"}),
    "the same layouts need no ring": changed(decode__tensorParallel=4, decode__staging={"poolSize": "16Mi"}),
    "the smallest ring": changed(prefill__staging={"bufferSize": "8Mi"}, decode__staging={"poolSize": "64Mi"}),
    "sizes in bytes": changed(prefill__staging={"bufferSize": 16777216}, decode__staging={"poolSize": "1.5Gi"}),
    "Mooncake": changed(transfer__backend="Mooncake"),
    "some wires": changed(transfer__wires=["RDMA", "NVLink"]),
    "the node's network without data ports": changed(
        transfer__wires=["SharedMemory", "NVLink"], agents={"hostNetwork": True}
    ),
    "no data ports and no policy": changed(transfer__wires=["CudaIPC"], agents={"networkPolicy": False}),
    "an open data path, accepted": changed(agents={"hostNetwork": True, "allowOpenDataPath": True}),
    "Mooncake's open data path, accepted": changed(
        transfer__backend="Mooncake", agents={"networkPolicy": False, "allowOpenDataPath": True}
    ),
    "everything of agents": changed(
        agents={
            "image": "agent:1",
            "tolerations": [{"operator": "Exists"}],
            "resources": {"limits": {"memory": "1Gi", "nvidia.com/gpu": 1}},
            "podMonitor": True,
            "runtimeClassName": "nvidia",
        }
    ),
    "everything of pods": changed(agents=POD, prefill__agents=POD, decode__agents=POD),
    "labels with a prefix": changed(prefill__nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H200", "zone": ""}),
    "a share of agents": changed(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": "100%"}}}),
    "a number of agents": changed(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": 50}}}),
    "a pause": changed(paused=True),
    "no digests": changed(integrity={"digest": False}),
    "digests": changed(integrity={"digest": True}),
    "host memory": changed(decode__target="Host"),
    "nobody expected": changed(prefill__instances=0),
    "sizes with exponents": changed(prefill__staging={"bufferSize": "64e6"}, decode__staging={"poolSize": "0.5Ti"}),
    "units of any size": changed(
        agents={
            "resources": {"requests": {"cpu": "1e-1", "scratch": "1E"}, "limits": {"cpu": "250000u", "scratch": "1Ei"}}
        }
    ),
    "all taints": changed(agents={"tolerations": [{"operator": "Exists", "value": ""}]}),
    "a registry with a port": changed(agents={"image": f"[::1]:5000/team/agent:1@sha256:{'a' * 64}"}),
    "a name of 40": named("a" * 40),
}

TOLERATIONS: dict[str, tuple[Body, str]] = {
    "a toleration of nothing": ({"value": "a"}, "give operator Exists, or a key"),
    "a taint that exists with a value": ({"key": "a", "operator": "Exists", "value": "b"}, "Exists takes no value"),
    "seconds without their effect": (
        {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5},
        "tolerationSeconds is for effect NoExecute",
    ),
}

BAD = {
    "no model": (changed(model=None), "spec.model: Required value"),
    "half a model": (
        changed(model__headDim=None),
        "model needs attention, layers, kvHeads, headDim and dtype, or caches",
    ),
    "no pages": (changed(prefill__pageSize=None), "spec.prefill.pageSize: Required value"),
    "no such attention": (changed(model__attention="SWA"), 'supported values: "MHA", "GQA", "MQA", "MLA"'),
    "no layers": (changed(model__layers=0), "spec.model.layers"),
    "a fraction of a head": (changed(model__kvHeads=1.5), "spec.model.kvHeads"),
    "no such dtype": (changed(model__dtype="fp8"), "spec.model.dtype"),
    "heads of a latent": (changed(model=MLA | {"kvHeads": 8}), "kvHeads must be 1 with attention MLA or MQA"),
    "heads of MQA": (changed(model=MQA | {"kvHeads": 2}), "kvHeads must be 1 with attention MLA or MQA"),
    "caches and a short form": (changed(model=MQA | caches("kv")), "leave out attention, layers, kvHeads"),
    "no caches": (changed(model={"caches": []}), "spec.model.caches"),
    "two caches of a name": (changed(model=caches("kv", "conv", name="kv")), "Duplicate value"),
    "a cache without planes": (changed(model=caches("kv", planes=[])), "spec.model.caches[0].planes"),
    "a cache of no layers": (changed(model=caches("kv", layers=None)), "spec.model.caches[0].layers: Required value"),
    "rows of a token": (changed(model=caches("conv", unit="Token")), "several rows, which only unit Slot has"),
    "a window of states": (changed(model=caches("conv", window=5)), "window is for unit Token"),
    **{
        f"{what} at {role}": (
            changed(**{"model": caches(*names), f"{role}__{field}": size}),
            f"{role}.{field} {expected}",
        )
        for role in ("prefill", "decode")
        for what, names, field, size, expected in (
            (
                "heads of a cache that do not split",
                ("kv", "conv"),
                "tensorParallel",
                6,
                "and heads of a plane of model.caches: one must divide the other",
            ),
            (
                "stages without layers of a cache",
                ("conv", "window"),
                "pipelineParallel",
                5,
                "has more stages than a cache",
            ),
        )
    },
    "whole pages of two sizes": (changed(model=caches("kv", "index"), decode__pageSize=16), "the two pageSizes differ"),
    "heads that do not split": (
        changed(prefill__tensorParallel=3),
        "prefill.tensorParallel and model.kvHeads: one must divide the other",
    ),
    "replicas that do not split": (
        changed(decode__tensorParallel=12),
        "decode.tensorParallel and model.kvHeads: one must divide the other",
    ),
    "stages without layers": (changed(prefill__pipelineParallel=81), "give at most as many stages as layers"),
    "decode's stages without layers": (changed(decode__pipelineParallel=81), "decode.pipelineParallel has more stages"),
    "too many ranks": (
        changed(model__kvHeads=1024, model__attention="MHA", prefill__tensorParallel=1024, prefill__pipelineParallel=4),
        "above 2048 ranks of one replica",
    ),
    "too many ranks of decode": (
        changed(model__kvHeads=1024, model__attention="MHA", decode__tensorParallel=1024, decode__pipelineParallel=4),
        "above 2048 ranks of one replica",
    ),
    "opaque on one side": (changed(prefill__pageOrder="Opaque"), "set it on both sides or on neither"),
    "opaque pages of two sizes": (
        changed(prefill__pageOrder="Opaque", decode__pageOrder="Opaque", decode__pageSize=16),
        "the two pageSizes differ",
    ),
    "a ring below two slabs a rank": (
        changed(decode__staging={"poolSize": "511Mi"}),
        "holds less than two slabs of prefill.staging.bufferSize for each source rank",
    ),
    "stages that share a ring": (
        changed(prefill__pipelineParallel=2, decode__staging={"poolSize": "1023Mi"}),
        "enlarge poolSize or reduce bufferSize",
    ),
    "a ring that always stages": (
        changed(decode__tensorParallel=4, transfer__staging="Always", decode__staging={"poolSize": "127Mi"}),
        "enlarge poolSize or reduce bufferSize",
    ),
    "a size that is none": (changed(decode__staging={"poolSize": "4GB"}), "spec.decode.staging.poolSize"),
    "a buffer that is none": (changed(prefill__staging={"bufferSize": "64MB"}), "spec.prefill.staging.bufferSize"),
    "a request that is none": (
        changed(agents={"resources": {"requests": {"memory": "2GB"}, "limits": {"memory": "1Gi"}}}),
        "spec.agents.resources.requests.memory",
    ),
    "a ring beyond all numbers": (
        changed(decode__staging={"poolSize": "99999999999E"}),
        "poolSize must be from 16Mi to 16Ti",
    ),
    "an image with a space": (changed(agents={"image": "a b"}), "spec.agents.image"),
    "a runtime class in capitals": (changed(agents={"runtimeClassName": "Nvidia"}), "spec.agents.runtimeClassName"),
    "a priority class with a space": (
        changed(decode__agents={"priorityClassName": "a b"}),
        "spec.decode.agents.priorityClassName",
    ),
    **{
        f"{name} at {place}": (changed(**{place: {"tolerations": [toleration]}}), expected)
        for place in ("agents", "prefill__agents", "decode__agents")
        for name, (toleration, expected) in TOLERATIONS.items()
    },
    "half a byte": (changed(prefill__staging={"bufferSize": "8388608.5"}), "spec.prefill.staging.bufferSize"),
    "a buffer below a slab": (changed(prefill__staging={"bufferSize": "1Mi"}), "bufferSize must be from 8Mi to 1Ti"),
    "a ring below two slabs": (
        changed(transfer__staging="Never", decode__staging={"poolSize": "15Mi"}),
        "poolSize must be from 16Mi to 16Ti",
    ),
    "no lanes": (changed(prefill__staging={"lanes": 0}), "spec.prefill.staging.lanes"),
    "no such backend": (changed(transfer__backend="NCCL"), 'supported values: "NIXL", "Mooncake"'),
    "a backend of one process": (changed(transfer__backend="Loopback"), "spec.transfer.backend"),
    "no such wire": (changed(transfer__wires=["Carrier"]), "spec.transfer.wires[0]"),
    "a wire twice": (changed(transfer__wires=["TCP", "TCP"]), "spec.transfer.wires[1]: Duplicate value"),
    "no such target": (changed(decode__target="Disk"), 'supported values: "Device", "Host"'),
    "an open data path": (changed(agents={"hostNetwork": True}), "accept it with agents.allowOpenDataPath"),
    "an open data path without a policy": (
        changed(agents={"networkPolicy": False}),
        "accept it with agents.allowOpenDataPath",
    ),
    "an open data path over the network": (
        changed(transfer__wires=["SharedMemory", "RDMA"], agents={"hostNetwork": True}),
        "accept it with agents.allowOpenDataPath",
    ),
    "Mooncake's open data path": (
        changed(transfer__backend="Mooncake", transfer__wires=["NVLink"], agents={"hostNetwork": True}),
        "accept it with agents.allowOpenDataPath",
    ),
    "a port of the system": (changed(agents={"httpPort": 80}), "spec.agents.httpPort"),
    "a chunk of nothing": (changed(transfer__chunkTokens=0), "spec.transfer.chunkTokens"),
    "a name of 41": (named("a" * 41), "longer than 40 characters"),
    "a name with a dot": (named("a.b"), "leave out dots"),
    "an underscore": (named("a_b"), "metadata.name"),
    "a digit first": (named("7b"), "must begin with a letter"),
    "a fraction of a byte": (changed(prefill__staging={"bufferSize": "8.3Mi"}), "a whole number of bytes"),
    "a fraction of a byte in the ring": (changed(decode__staging={"poolSize": "600.3Mi"}), "a whole number of bytes"),
    "a label key of no node": (changed(prefill__nodeSelector={"a b": "c"}), "a key that no node can have"),
    "a label key of no node of decode": (changed(decode__nodeSelector={"a b": "c"}), "a key that no node can have"),
    "a label value of no node": (changed(decode__nodeSelector={"a": "b c"}), "spec.decode.nodeSelector.a"),
    "one port for two": (changed(agents={"httpPort": 9500, "workerPort": 9500}), "are the same port"),
    "no port after the last": (
        changed(agents={"httpPort": 65535, "hostNetwork": True, "allowOpenDataPath": True}),
        "choose an httpPort up to 65000",
    ),
    "more than the limit": (
        changed(agents={"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1024Mi"}}}),
        "a request is above its limit",
    ),
    "more than a role's limit": (
        changed(decode__agents={"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}),
        "a request is above its limit",
    ),
    "more than prefill's limit": (
        changed(prefill__agents={"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": 1}}}),
        "a request is above its limit",
    ),
    "a variable that is no name": (changed(agents={"env": [{"name": "UCX TLS"}]}), "spec.agents.env[0].name"),
    "a variable twice": (changed(agents={"env": [{"name": "UCX_TLS"}] * 2}), "Duplicate value"),
    "a volume of nothing": (changed(agents={"volumes": [{"name": "a"}]}), "give a volume one source"),
    "a volume of nothing at decode": (changed(decode__agents={"volumes": [{"name": "a"}]}), "give a volume one source"),
    "a volume of two sources": (
        changed(prefill__agents={"volumes": [{"name": "a", "emptyDir": {}, "hostPath": {"path": "/"}}]}),
        "give a volume one source",
    ),
    "a type without confinement": (
        changed(agents={"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}),
        "spec.agents.securityContext.seLinuxOptions.type",
    ),
    "nobody replaced": (
        changed(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": "0%"}}}),
        "a share from 1% to 100%",
    ),
    "all and more": (
        changed(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": "101%"}}}),
        "a share from 1%",
    ),
    "none at a time": (changed(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}}), "a number from 1"),
}

CHANGES = {
    "the model": ({"model__layers": 81}, "make a new DisaggDeployment"),
    "caches for a short form": ({"model": caches("kv")}, "make a new DisaggDeployment"),
    "the element type": ({"model__dtype": "float16"}, "make a new DisaggDeployment"),
    "keys go back": ({"agents": {"keysRevision": 1}}, "leave it or raise it"),
}


@functools.cache
def crd() -> Body:
    text = (ROOT / "crds/disaggdeployments.longshore.dev.yaml").read_text(encoding="utf-8")
    schema: Body = parse(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def places(schema: Body, path: str = "") -> Iterator[tuple[str, Body]]:
    yield path, schema
    for name, entry in schema.get("properties", {}).items():
        if f"{path}.{name}" != ".status":
            yield from places(entry, f"{path}.{name}")
    for key, name in (("additionalProperties", ".*"), ("items", "[]")):
        if isinstance(schema.get(key), dict):
            yield from places(schema[key], f"{path}{name}")


# For each keyword of a schema, a value that breaks it.
BREAKING: dict[str, Any] = {
    "maximum": lambda place: place["maximum"] + 1,
    "minimum": lambda place: place["minimum"] - 1,
    "maxLength": lambda place: "1" * (place["maxLength"] + 1),
    "minLength": lambda place: "",
    "pattern": lambda place: " !",
    "enum": lambda place: "Neither",
    "minItems": lambda place: [],
    "maxItems": lambda place: [{"name": f"UCX_{n}", "mountPath": f"/{n}"} for n in range(place["maxItems"] + 1)],
    "maxProperties": lambda place: {f"k{n}": "v" for n in range(place["maxProperties"] + 1)},
    "type": lambda place: {"object": "text", "array": {}, "string": 1, "integer": "one", "boolean": "yes"}[
        place["type"]
    ],
}


def broken_limits() -> dict[tuple[str, str], Body]:
    """Return a manifest for each path and keyword of the spec's schema, which breaks that one."""
    return {
        (path, keyword): with_value(BASE, path, breaking(place))
        for path, place in places(crd()["properties"]["spec"], ".spec")
        for keyword, breaking in BREAKING.items()
        if keyword in place
    }


def with_value(base: Body, path: str, value: Any) -> Body:
    """Return a manifest with a value at a path of the schema, in one entry of each list and mapping on the way."""
    for key in reversed(path.replace("[]", ".[]").removeprefix(".").split(".")):
        value = [value] if key == "[]" else {key.replace("*", "key"): value}
    found: Body = merged(base, value)
    return found


def merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: merged(one[key], value) if key in one else value for key, value in other.items()}
