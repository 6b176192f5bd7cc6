"""An evaluator beside a run: each task learns who it is from its own variables, and the program is the same for all."""

import json
import sys
from pathlib import Path

from tests.ports import free_ports
from tests.process.tasks import Started

PROGRAM = Path(__file__).parent / "evaluated.py"


def test_an_evaluator_evaluates_the_checkpoints_with_the_programs_hooks_and_ends_with_the_run(tmp_path: Path) -> None:
    ps, chief = (f"localhost:{port}" for port in free_ports(2))
    cluster = {"ps": [ps], "chief": [chief], "evaluator": ["localhost:1"]}

    def config(job: str) -> dict[str, str]:
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})}

    spec = {"CLUSTER_SPEC": json.dumps(cluster), "JOB_NAME": "ps", "TASK_INDEX": "ps-0"}
    started: dict[str, Started] = {}
    try:
        for job, variables in (("evaluator", config("evaluator")), ("ps", spec)):
            started[job] = Started([sys.executable, str(PROGRAM), str(tmp_path)], variables, forked=True)
        started["evaluator"].until("following the checkpoints")
        started["chief"] = Started([sys.executable, str(PROGRAM), str(tmp_path)], config("chief"), forked=True)
        for job, task in started.items():
            assert task.wait() == 0, f"{job}: {task.tail()}"
    finally:
        for task in started.values():
            task.end()
    evaluator = started["evaluator"].lines
    found = [line for line in evaluator if line.startswith("After ")]
    steps = [int(line.split()[1]) for line in found]
    assert steps == sorted(set(steps)) and steps[-1] == 30 and len(steps) >= 1
    # With a decay of 0 the moving average is the variable, so the accuracy is the step.
    assert [line.split()[-1] for line in found] == [f"{step}." for step in steps]
    assert evaluator[-2:] == ["evaluator=0, final accuracy = 30.0", "done at 30: 30"]
    assert "done at 30: 30" in started["chief"].lines[-1]
    assert "cluster from CLUSTER_SPEC" in started["ps"].lines[0]
    noted = [json.loads(line) for line in (tmp_path / "measures.jsonl").read_text().splitlines()]
    assert {entry["global_step"] for entry in noted} >= set(steps)
