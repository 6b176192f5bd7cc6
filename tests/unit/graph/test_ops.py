"""The list of operations that compute tasks run."""

import pytest
import torch

from torchquorum.errors import GraphError
from torchquorum.graph import ops


def test_every_name_on_the_list_of_operations_exists() -> None:
    assert not [name for name in ops.OPERATIONS if not hasattr(torch.ops.aten, name)]


def test_an_operation_has_the_same_name_in_both_directions() -> None:
    for name in ("aten.add.Tensor", "aten.relu_.default", "operator.floordiv", "torch.sym_max"):
        assert ops.name_of(ops.find(name)) == name


@pytest.mark.parametrize("name", ["aten.set_.source_Tensor", "aten.add.out", "aten.from_file.default", "os.system"])
def test_what_is_not_on_the_list_is_no_operation(name: str) -> None:
    with pytest.raises(GraphError, match="not one that a compute task runs"):
        ops.find(name)
