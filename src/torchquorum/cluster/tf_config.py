"""Clusters described in a variable: TF_CONFIG, and CLUSTER_SPEC with JOB_NAME and TASK_INDEX.

Called by `environment`. What always holds: an error quotes the wrong part and shows the expected form; a task of the job
`evaluator` is not part of the cluster, whether the cluster lists it or not.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from torchquorum import env
from torchquorum.cluster.finding import Finding
from torchquorum.cluster.spec import ClusterSpec, strip_quotes
from torchquorum.errors import ClusterError

_TF_CONFIG_SHAPE = (
    '{"cluster": {"ps": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_CLUSTER_SPEC_SHAPE = '{"ps": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]}'
TASK_NAMES = ("JOB_NAME", "TASK_INDEX", "TASK_ID")


def is_tf_config(text: str) -> bool:
    """Whether TF_CONFIG describes a cluster; TensorFlow writes {} for none."""
    return re.sub(r"\s", "", strip_quotes(text)) != "{}"


def read_tf_config(text: str) -> Finding:
    """Reads TF_CONFIG.

    Raises:
        ClusterError: It is not valid.
    """
    # On Windows, `set TF_CONFIG='{...}'` keeps the quotes.
    text = strip_quotes(text)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        position = getattr(error, "pos", 0)
        near = text[max(0, position - 20) : position + 20]
        raise ClusterError(
            f"TF_CONFIG is not JSON near {near!r} ({error}): must look like {_TF_CONFIG_SHAPE}; "
            "check its brackets and commas, and use double quotes inside"
        ) from None
    cluster = ClusterSpec(_take(config, "TF_CONFIG", "cluster", dict))
    task = _take(config, "TF_CONFIG", "task", dict)
    job = _take(task, 'TF_CONFIG["task"]', "type", str)
    index = _take(task, 'TF_CONFIG["task"]', "index", int)
    return Finding(source=env.TF_CONFIG, cluster=cluster, task=cluster.find_task(job, index))


def read_cluster_spec(text: str, variables: Mapping[str, str]) -> Finding:
    """Reads CLUSTER_SPEC, JOB_NAME and TASK_INDEX (or TASK_ID).

    CLUSTER_SPEC is JSON, or `ps|host:port;host:port,worker|host:port` as in TensorFlow's first servers. The index may be a
    pod's name, `ps-0`: its last number counts, so that Kubernetes can set it without a shell.

    Raises:
        ClusterError: One of them is not valid.
    """
    cluster = ClusterSpec(_read_jobs(text))
    job = variables.get("JOB_NAME")
    if job is None:
        raise ClusterError("CLUSTER_SPEC is set and JOB_NAME is not: must be ps, worker, chief or evaluator; set it")
    return Finding(source=env.CLUSTER_SPEC, cluster=cluster, task=cluster.find_task(job, _read_index(variables)))


def _read_jobs(text: str) -> dict[str, Any]:
    text = strip_quotes(text)
    if "|" in text and not text.startswith("{"):
        parts = [part.partition("|") for part in text.split(",")]
        return {job.strip(): [a for a in hosts.split(";") if a.strip()] for job, _, hosts in parts}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(text)  # a Python dict, in single quotes
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
    if isinstance(found, dict) and isinstance(found.get("cluster"), dict):
        found = found["cluster"]
    if not isinstance(found, dict):
        raise ClusterError(
            f"CLUSTER_SPEC={shorten(text)}: must be JSON such as {_CLUSTER_SPEC_SHAPE}; check its brackets, commas and quotes"
        )
    return found


def _read_index(variables: Mapping[str, str]) -> int:
    given = {name: variables[name] for name in ("TASK_INDEX", "TASK_ID") if name in variables}
    if not given:
        raise ClusterError(
            "CLUSTER_SPEC is set and TASK_INDEX is not: must be the task's index in its job, from 0; set it"
        )
    found = set[int]()
    for name, text in given.items():
        match = re.fullmatch(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*-)?([0-9]{1,9})", strip_quotes(text))
        if match is None:
            raise ClusterError(
                f"{name}={shorten(text)}: must be a whole number, 0 or more, or a pod's name that ends in a number, such as ps-0"
            )
        found.add(int(match[1]))
    if len(found) > 1:
        told = " and ".join(f"{name}={text}" for name, text in given.items())
        raise ClusterError(f"{told}: must agree; keep one of them")
    return found.pop()


def _take(part: object, label: str, key: str, kind: type[Any]) -> Any:
    """Returns an entry of a part of TF_CONFIG; raises ClusterError if it is missing or of the wrong type."""
    if not isinstance(part, dict) or key not in part:
        came = f"{label} is {shorten(json.dumps(part))} and has no {key!r}"
        raise ClusterError(f"{came}: must look like {_TF_CONFIG_SHAPE}; add {key!r}")
    value = part[key]
    # Some operators write the index as text.
    if kind is int and isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {dict: "an object", str: "a text", int: "a whole number"}
        came = f"{label}[{key!r}] is {shorten(json.dumps(value))}"
        raise ClusterError(f"{came}: must be {names[kind]}, as in {_TF_CONFIG_SHAPE}; change it")
    return value


def shorten(text: str) -> str:
    """Returns a text, shortened for a message."""
    return text if len(text) <= 80 else f"{text[:77]}..."
