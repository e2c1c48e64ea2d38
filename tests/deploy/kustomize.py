"""What `kubectl kustomize FOLDER` makes of a folder, as far as deploy/kubernetes uses it.

Anything else in a kustomization is an error here, so that nothing is left out unseen. Where kubectl
is at hand, test_kubernetes.py compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

MERGED_BY = {
    "containers": "name",
    "env": "name",
    "initContainers": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists of a Pod whose items a strategic merge patch matches by a field; others it replaces."""

_FIELDS = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator"}


def build(folder: Path) -> list[Resource]:
    """All resources of a kustomization, patched, in the order in which they are named."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    _only(kustomization, _FIELDS, folder)
    resources: list[Resource] = []
    for name in kustomization["resources"]:
        path = folder / name
        resources += build(path) if path.is_dir() else _read(path)
    for entry in kustomization.get("configMapGenerator", []):
        resources.append(_config_map(entry, folder))
    for patch in kustomization.get("patches", []):
        _apply(patch, resources, folder)
    for image in kustomization.get("images", []):
        _only(image, {"name", "newName", "newTag"}, folder)
        for container in (c for resource in resources for c in all_containers(resource)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return resources


def all_containers(resource: Resource) -> list[dict[str, Any]]:
    """Of a Deployment, the init containers first; of other kinds none."""
    if resource["kind"] != "Deployment":
        return []
    pod = resource["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def merge(base: dict[str, Any], patch: dict[str, Any]) -> None:
    """A strategic merge patch, into `base`; null takes a field away."""
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        elif key in MERGED_BY and isinstance(base.get(key), list):
            known = {item[MERGED_BY[key]]: item for item in base[key]}
            for item in value:
                if (name := item[MERGED_BY[key]]) in known:
                    merge(known[name], item)
                else:
                    base[key].append(item)
        else:
            base[key] = value


def change(resource: Any, operations: list[dict[str, Any]]) -> None:
    """A JSON patch of `add` operations (RFC 6902), onto `resource`."""
    for operation in operations:
        _only(operation, {"op", "path", "value"}, operation)
        assert operation["op"] == "add", operation
        *steps, last = operation["path"].removeprefix("/").split("/")
        place = resource
        for step in steps:
            place = place[int(step) if isinstance(place, list) else step]
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            place[last] = operation["value"]


def _only(found: dict[str, Any], known: set[str], where: object) -> None:
    assert not (unknown := found.keys() - known), f"{where}: not resolved here: {sorted(unknown)}"


def _read(path: Path) -> list[Resource]:
    # Aliases in YAML are one object in many places, and a patch is for one place.
    return [_unshared(item) for item in yaml.safe_load_all(path.read_text())]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _config_map(entry: dict[str, Any], folder: Path) -> Resource:
    _only(entry, {"name", "files", "options"}, folder)
    options = entry["options"]
    _only(options, {"disableNameSuffixHash", "labels"}, folder)
    assert options["disableNameSuffixHash"] is True, "names with a hash are not resolved here"
    files = [file.split("=") for file in entry["files"]]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": entry["name"], "labels": options["labels"]},
        "data": {name: (folder / path).read_text() for name, path in files},
    }


def _apply(patch: dict[str, Any], resources: list[Resource], folder: Path) -> None:
    _only(patch, {"path", "patch", "target"}, folder)
    text = (folder / patch["path"]).read_text() if "path" in patch else patch["patch"]
    content = yaml.safe_load(text)
    if "target" in patch:
        _only(patch["target"], {"kind", "name"}, folder)
        kind, name = patch["target"]["kind"], patch["target"]["name"]
    else:
        kind, name = content["kind"], content["metadata"]["name"]
    [resource] = [
        item for item in resources if (item["kind"], item["metadata"]["name"]) == (kind, name)
    ]
    if isinstance(content, list):
        change(resource, content)
    else:
        merge(resource, content)
