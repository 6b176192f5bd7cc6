"""What an evaluator's session refuses, and how it ends where there is no run."""

import pytest
import torch

import torchquorum as tq
from tests.unit.formats.checkpoints import save
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.rpc import Patience

PATIENCE = Patience(start_s=0.1)


def session(**named) -> tq.Session:
    network = InProcessNetwork()
    listener = network.listen("localhost:1")  # never answers
    cluster = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
    task = tq.Task(cluster=cluster, id=TaskId("evaluator", 0), connect=network.connect)
    model = torch.nn.Linear(2, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    made = tq.Session(task, model, optimizer, patience=PATIENCE, **named)
    assert type(made) is tq.Session and listener
    return made


def test_it_needs_a_folder_to_follow(monkeypatch):
    monkeypatch.delenv("TORCHQUORUM_LOGDIR", raising=False)
    with pytest.raises(ConfigError, match="an evaluator follows the checkpoints in the run's folder: give tq.Session"):
        session()


def test_without_a_run_it_ends_when_its_patience_is_over_and_says_so(tmp_path, capsys):
    with session(logdir=tmp_path) as ended:
        assert ended.should_stop() and ended.global_step == 0
        ended.optimizer.step()
        assert ended.optimizer.last.stop
    said = capsys.readouterr().err
    assert "no answer from ps task 0" in said and "nothing to evaluate with" in said


def test_checkpoints_of_another_model_are_an_error(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(TorchQuorumError, match="are of another model: no weight"), session(logdir=tmp_path):
        pass
