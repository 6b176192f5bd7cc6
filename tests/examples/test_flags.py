"""The flags of the tutorials' programs: names, defaults and help are the tutorials'."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

SUPERVISOR = {
    "job_name": ("worker", '"ps" or "worker"'),
    "ps_hosts": ("localhost:20000,localhost:20001", "Comma-separated list of host:port for the parameter server job."),
    "worker_hosts": ("localhost:20003,localhost:20004", "Comma-separated list of host:port for the worker job."),
    "task_id": (0, "Task ID of the worker/replica running the train"),
    "training_steps": (10000, ""),
    "model_save_path": ("./mnist_model/", ""),
}
MONITORED = {
    "job_name": ("worker", ' "ps" or "worker" '),
    "ps_hosts": (" tf-ps0:2222,tf-ps1:1111", "Comma-separated list of hostname:port for the parameter server jobs."),
    "worker_hosts": (
        " tf-worker0:2222, tf-worker1:1111",
        "Comma-separated list of hostname:port for the worker jobs. ",
    ),
    "task_id": (0, "Task ID of the worker/replica running the training."),
    "training_steps": (20000, ""),
    "model_save_path": ("./log1", ""),
}
EXPECTED = {
    "async_supervisor.py": SUPERVISOR,
    "sync_supervisor.py": SUPERVISOR,
    "async_monitored.py": MONITORED,
    "sync_monitored.py": {
        **MONITORED,
        "ps_hosts": (" tf-ps0:2222, tf-ps1:1111", "Comma-separated list of hostname:port"),
        "model_save_path": ("./log2", ""),
    },
    "softmax_epochs.py": {
        "job_name": (None, ""),
        "task_index": (None, ""),
        "ps_hosts": ("localhost:9001", ""),
        "worker_hosts": ("localhost:9002,localhost:9003,localhost:9004", ""),
        "n_epochs": (50, ""),
        "n_epochs_print": (10, ""),
        "gpu_memory_fraction": (0.2, ""),
    },
    "issync.py": {
        "ps_hosts": (None, "Comma-separated list of hostname:port pairs"),
        "worker_hosts": (None, "Comma-separated list of hostname:port pairs"),
        "job_name": (None, "job name: worker or ps"),
        "task_index": (None, "Index of task within the job"),
        "issync": (None, "是否采用分布式的同步模式，1表示同步模式，0表示异步模式"),  # noqa: RUF001
    },
}


def load_parser(program: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{program.removesuffix('.py')}", EXAMPLES / program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("mnist_inference", None)
    return module.parser


@pytest.mark.parametrize("program", EXPECTED)
def test_flags_have_the_names_defaults_and_help_of_the_tutorial(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = load_parser(program, monkeypatch)
    actions = {action.dest: action for action in parser._actions}
    for name, (default, text) in EXPECTED[program].items():
        assert f"--{name}" in actions[name].option_strings
        assert actions[name].default == default
        assert (actions[name].help or "").startswith(text)


@pytest.mark.parametrize("program", EXPECTED)
def test_help_names_the_commands_that_start_every_task(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = load_parser(program, monkeypatch).format_help()
    for command in (
        "--job_name=ps",
        "--job_name=worker",
        f"torchquorum run --ps 1 --workers {2 + ('soft' in program)}",
    ):
        assert command in text
