"""Reads the manifests in deploy/, and checks them as the cluster's API would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY, DATA = ROOT / "deploy", ROOT / "tests/data"
_KUBERNETES = json.loads((DATA / "kubernetes.schema.json").read_text())


def load(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a manifest."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check(kind: str, document: dict[str, Any]) -> None:
    """Checks a document against Kubernetes' schema of its kind, in which unknown fields are errors."""
    schema = {"$ref": f"#/definitions/{_KUBERNETES['kinds'][kind]}", "definitions": _KUBERNETES["definitions"]}
    jsonschema.Draft7Validator(schema).validate(document)


def check_custom(name: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Checks a custom resource and every pod template in it; returns the templates."""
    jsonschema.Draft7Validator(json.loads((DATA / f"{name}.schema.json").read_text())).validate(document)
    found = list(_templates(document))
    for template in found:
        check("PodTemplateSpec", template)
    return found


def _templates(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, list):
        return [t for entry in part for t in _templates(entry)]
    if not isinstance(part, dict):
        return []
    own = [part["template"]] if isinstance(part.get("template"), dict) else []
    return own + [t for key, entry in part.items() if key != "template" for t in _templates(entry)]


def command(container: dict[str, Any]) -> list[str]:
    """Returns what a container runs."""
    return [*container.get("command", []), *container.get("args", [])]
