"""A real Ray of several machines on this one, for tests: a process that has the cluster and does what it is told by its stdin.

`Machines` starts it and speaks with it. A line is a word and its arguments as JSON, the answer is one line of JSON. Ray's own
files lie in a folder of their own, with a short name, since Unix sockets in it must have short ones; it goes at the end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

STORE_BYTES = 80 << 20
# A machine that dies is noticed in a few seconds instead of half a minute.
QUICK = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3, "health_check_timeout_ms": 5000}


class Machines:
    """Starts and stops machines, and looks what is on them.

    Args:
        head_cpus: The CPUs of the first machine, which cannot be taken away.
        dashboard: Whether it has what `ray job submit` needs.
    """

    def __init__(self, head_cpus: int = 0, *, dashboard: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="tqray", dir="/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.ray_machines", str(head_cpus), str(int(dashboard))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RAY_TMPDIR": self.folder,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_DEDUP_LOGS": "0",
                "RAY_worker_niceness": "0",  # Ray's 15 would leave them nothing of a busy machine
            },
            start_new_session=True,
        )
        first = self._answer()
        self.address, self.dashboard = str(first["address"]), str(first["dashboard"])

    def add(self, cpus: int, gpus: int = 0) -> str:
        """Adds a machine, whose GPUs are only numbers; returns its address."""
        return self._ask("add", cpus, gpus)

    def remove(self, name: str) -> None:
        """Takes a machine away, with all that runs there."""
        self._ask("remove", name)

    def actors(self) -> dict[str, str]:
        """Returns the machine of every living actor of a task, by the task's number of its process."""
        return self._ask("actors")

    def left(self) -> list[str]:
        """Returns what is still there of runs: actors and placement groups."""
        return self._ask("left")

    def told(self) -> str:
        """Returns all that Ray tells anybody who asks about actors, jobs, tasks, processes and their environments."""
        return self._ask("told")

    def close(self) -> None:
        """Ends all machines."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, 9)
                self._process.wait(60)
            self._process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("> "):
            if not line:
                raise AssertionError("the Ray of the test has ended")
        return json.loads(line[2:])


def serve(head_cpus: int, dashboard: bool) -> None:
    """Has the cluster, until stdin ends."""
    import ray
    from ray._private import state
    from ray.cluster_utils import Cluster
    from ray.util import state as state_api

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": head_cpus,
            "include_dashboard": dashboard,
            "object_store_memory": STORE_BYTES,
            "_system_config": QUICK,
            **({"dashboard_port": 0} if dashboard else {}),
        },
    )
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    nodes: dict[str, Any] = {}
    numbers = itertools.count(2)

    def living() -> list[dict[str, Any]]:
        return [
            a for a in state.actors().values() if a["State"] != "DEAD" and "TaskHost" in a.get("ActorClassName", "")
        ]

    def answer(what: str, *rest: Any) -> Any:
        if what == "add":
            # Another address of loopback, so that machines differ and no program here takes one of them for its own.
            address = f"127.0.0.{next(numbers)}"
            nodes[address] = cluster.add_node(
                num_cpus=rest[0], num_gpus=rest[1], object_store_memory=STORE_BYTES, node_ip_address=address
            )
            return address
        if what == "remove":
            cluster.remove_node(nodes.pop(rest[0]), allow_graceful=False)
            return None
        if what == "told":
            lists = [state_api.list_actors, state_api.list_jobs, state_api.list_tasks, state_api.list_workers]
            lists += [state_api.list_runtime_envs, state_api.list_placement_groups]
            found = [each(address=f"http://{cluster.webui_url}", detail=True, limit=10_000) for each in lists]
            return f"{found} {state.actors()} {state.jobs()}"
        if what == "actors":
            return {str(a["Pid"]): a["Address"]["IPAddress"] for a in living()}
        groups = ray.util.placement_group_table().values()
        return [
            *(f"actor {a['ActorID']} is {a['State']}" for a in living()),
            *(f"group {g['placement_group_id']} is {g['state']}" for g in groups if g["state"] != "REMOVED"),
        ]

    say({"address": cluster.address, "dashboard": cluster.webui_url or ""})
    for line in sys.stdin:
        say(answer(*json.loads(line)))
    ray.shutdown()
    cluster.shutdown()


def say(answer: Any) -> None:
    """Answers; what Ray prints meanwhile has no mark in front."""
    print(f"> {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2] == "1")
