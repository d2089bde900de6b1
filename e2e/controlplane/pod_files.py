"""Creates a pod's volumes and environment variables from the API server's objects.

Called by `process_pod` with the node's rights: a Secret that the API server does not show to the node is not mounted.
Files are those of the pod's start; a kubelet would follow changes of ConfigMaps.
"""

from __future__ import annotations

import base64
import itertools
import os
import shutil
from pathlib import Path

from controlplane.node_api import Body, NodeApi, NodeApiError

_DEFAULT_MODE = 0o644
_TOKEN_S = 3607
_NOT_THERE = (403, 404)


class PodFiles:
    """The volumes of one pod, in `folder`. Host paths are below `host`, which stands for the node's root."""

    def __init__(self, api: NodeApi, pod: Body, folder: Path, host: Path) -> None:
        self._api = api
        self._pod = pod
        self._folder = folder
        self._host = host
        self._group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
        # Folder by volume; None for memory.
        self.volumes: dict[str, Path | None] = {}

    def make(self) -> None:
        """Create all volumes. Raises NodeApiError while a required object does not exist."""
        for volume in self._pod["spec"].get("volumes") or ():
            self.volumes[volume["name"]] = self._volume(volume)

    def mounts(self, container: Body) -> list[Body]:
        """Return a container's mounts, outer ones first."""
        found: list[Body] = [
            {
                "source": None if (source := self.volumes[mount["name"]]) is None else str(source),
                "target": mount["mountPath"],
                "read_only": bool(mount.get("readOnly")),
            }
            for mount in container.get("volumeMounts") or ()
        ]
        found.sort(key=lambda mount: str(mount["target"]))
        for outer, inner in itertools.permutations(found, 2):
            if inner["target"].startswith(f"{outer['target']}/") and outer["source"] is not None:
                # Created first, as by a kubelet: the outer mount may be read-only when the inner one needs its directory.
                Path(outer["source"], inner["target"][len(outer["target"]) + 1 :]).mkdir(parents=True, exist_ok=True)
        return found

    def field(self, path: str) -> str:
        """Return a field of the pod in the form of the downward API."""
        value: object = self._pod
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return "" if value is None else str(value)

    def environment(self, container: Body) -> dict[str, str]:
        """Return the variables of a container's specification."""
        found: dict[str, str] = {}
        for source in container.get("envFrom") or ():
            found |= self._data("configmaps", source["configMapRef"], source["configMapRef"]["name"])
        for entry in container.get("env") or ():
            source = entry.get("valueFrom")
            assert source is None or "fieldRef" in source, f"a process node knows no {source}"
            found[entry["name"]] = (
                entry.get("value", "") if source is None else self.field(source["fieldRef"]["fieldPath"])
            )
        return found

    def _volume(self, volume: Body) -> Path | None:
        place = self._folder / volume["name"]
        if "emptyDir" in volume:
            if (volume["emptyDir"] or {}).get("medium") == "Memory":
                return None
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)
            return place
        if "hostPath" in volume:
            place = self._host / volume["hostPath"]["path"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            return place
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if "configMap" in volume:
            source = volume["configMap"]
            self._write(place, self._config_map(source), source.get("defaultMode", _DEFAULT_MODE))
        elif "secret" in volume:
            source = volume["secret"]
            self._write(place, self._secret(source, "secretName"), source.get("defaultMode", _DEFAULT_MODE))
        else:
            projected = volume["projected"]
            for source in projected["sources"]:
                self._write(place, self._projection(source), projected.get("defaultMode", _DEFAULT_MODE))
        return place

    def _projection(self, source: Body) -> dict[str, bytes]:
        if token := source.get("serviceAccountToken"):
            return {token["path"]: self._token(token)}
        if config := source.get("configMap"):
            return self._config_map(config)
        if secret := source.get("secret"):
            return self._secret(secret, "name")
        entries = source["downwardAPI"]["items"]
        return {entry["path"]: self.field(entry["fieldRef"]["fieldPath"]).encode() for entry in entries}

    def _config_map(self, source: Body) -> dict[str, bytes]:
        data = self._data("configmaps", source, source["name"])
        return {path: text.encode() for path, text in data.items()}

    def _secret(self, source: Body, field: str) -> dict[str, bytes]:
        data = self._data("secrets", source, source[field])
        return {path: base64.b64decode(text) for path, text in data.items()}

    def _data(self, kind: str, source: Body, name: str) -> dict[str, str]:
        """Return the content of a ConfigMap or Secret, by path."""
        try:
            data = self._api.get(f"{self._namespace}/{kind}/{name}").get("data") or {}
        except NodeApiError as error:
            # The API server hides objects that no pod of the node names, so an optional one may not exist.
            if source.get("optional") and error.status in _NOT_THERE:
                return {}
            raise
        entries = source.get("items") or [{"key": key, "path": key} for key in data]
        return {entry["path"]: data[entry["key"]] for entry in entries}

    def _token(self, source: Body) -> bytes:
        """Request a token of the pod's ServiceAccount that is bound to this pod."""
        metadata = self._pod["metadata"]
        reference = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec = {"expirationSeconds": source.get("expirationSeconds", _TOKEN_S), "boundObjectRef": reference}
        if source.get("audience"):
            spec["audiences"] = [source["audience"]]
        account = self._pod["spec"]["serviceAccountName"]
        made = self._api.create(f"{self._namespace}/serviceaccounts/{account}/token", {"spec": spec})
        return str(made["status"]["token"]).encode()

    @property
    def _namespace(self) -> str:
        return f"/api/v1/namespaces/{self._pod['metadata']['namespace']}"

    def _write(self, place: Path, files: dict[str, bytes], mode: int) -> None:
        for name, data in files.items():
            path = place / name
            path.write_bytes(data)
            if self._group is not None:
                os.chown(path, -1, self._group)
                mode |= 0o040
            path.chmod(mode)
