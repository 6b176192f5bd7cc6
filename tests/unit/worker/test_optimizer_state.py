"""The optimizer's state: put together from what the ps tasks sent, in torch's layout."""

import torch
from torch import nn

from torchquorum.placement.layout import Variable
from torchquorum.wire.messages import StatePiece, StateRef
from torchquorum.worker.optimizer_state import OptimizerState


def test_parts_of_several_ps_tasks_make_one_state() -> None:
    variables = [
        Variable(name="w", shape=(2, 2), dtype="float32", group=0),
        Variable(name="b", shape=(2,), dtype="float32", group=1),
        Variable(name="c", shape=(1,), dtype="float32", group=-1),
    ]
    first = torch.tensor([1.0, 2.0, 3.0, 7.0, 8.0])
    second = torch.tensor([4.0])
    steps = {"step": {"tensor": 5.0, "dtype": "float32"}}
    parts = [
        (
            StateRef(
                [StatePiece(0, "mean", 0, 3, (), "float32"), StatePiece(1, "rows", 0, 2, (2, 1), "float32")],
                {"w": steps},
            ),
            first.numpy().tobytes(),
        ),
        (StateRef([StatePiece(0, "mean", 3, 1, (), "float32")], {}), second.numpy().tobytes()),
        (StateRef([], {}), b""),
    ]
    parameters = [nn.Parameter(torch.zeros(v.shape)) for v in variables]
    groups = [{"params": [parameters[0]], "lr": 9.0, "name": "mine"}, {"params": [parameters[1]], "lr": 9.0}]
    found = OptimizerState(variables, parts).in_torchs_layout(groups, parameters, [{"lr": 0.5}, {}], [0.5, 0.25])
    assert [(g["params"], g["lr"]) for g in found["param_groups"]] == [([0], 0.5), ([1], 0.25)]
    assert found["param_groups"][0]["name"] == "mine" and list(found["state"]) == [0, 1]
    assert torch.equal(found["state"][0]["mean"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(found["state"][0]["step"], torch.tensor(5.0))
    assert found["state"][1]["rows"].shape == (2, 1)
