"""Writes tests/data/kubernetes.schema.json: the schemas that the manifests in deploy/ are checked against.

They are Kubernetes' own, as the package kubernetes-validate carries them, reduced to the kinds that are used there and
without descriptions. Run by hand when the manifests are to be checked against another version:

    pip install kubernetes-validate && python tools/kubernetes_schemas.py 1.34
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "Service": "io.k8s.api.core.v1.Service",
    "Secret": "io.k8s.api.core.v1.Secret",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "PodTemplateSpec": "io.k8s.api.core.v1.PodTemplateSpec",
}
TARGET = Path(__file__).parents[1] / "tests/data/kubernetes.schema.json"


def main(version: str) -> None:
    """Collects the schemas of a version and everything that they refer to."""
    import kubernetes_validate  # pyright: ignore[reportMissingImports]

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    known = json.loads((folder / "_definitions.json").read_text())["$defs"]
    definitions: dict[str, Any] = {}
    waiting = list(KINDS.values())
    while waiting:
        name = waiting.pop()
        if name not in definitions:
            definitions[name] = reduce(known[name], waiting)
    found = {"kubernetes": version, "kinds": KINDS, "definitions": dict(sorted(definitions.items()))}
    TARGET.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"wrote {TARGET.name}: {len(definitions)} definitions, {TARGET.stat().st_size} bytes")


def reduce(part: Any, wanted: list[str]) -> Any:
    """Returns a schema without descriptions, its references turned into local ones, which are added to `wanted`."""
    if isinstance(part, list):
        return [reduce(entry, wanted) for entry in part]
    if not isinstance(part, dict):
        return part
    kept: dict[str, Any] = {}
    for key, value in part.items():
        if key in ("description", "$schema") and isinstance(value, str):
            continue
        if key.startswith("x-kubernetes-"):
            continue
        if key == "$ref":
            name = str(value).rpartition("/")[2]
            wanted.append(name)
            kept[key] = f"#/definitions/{name}"
        else:
            kept[key] = reduce(value, wanted)
    return kept


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "1.34")
