"""The workflows of the public repository run commands that exist."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_workflows_run_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran: set[str] = set()
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            ran |= {step["run"] for step in job["steps"] if "run" in step}
    made = {target for command in ran for target in re.findall(r"\bmake ([a-z-]+)", command)}
    scripts = {script for command in ran for script in re.findall(r"\bbash (\S+)", command)}
    assert made and made <= targets, made - targets
    assert scripts and all((ROOT / script).is_file() for script in scripts), scripts
