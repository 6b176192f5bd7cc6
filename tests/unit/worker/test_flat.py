"""The worker's parameters as views of flat buffers."""

import pytest
import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import ALIGN_BYTES, CONSTANT, place
from torchquorum.worker.flat import FlatParameters, Puller, Pusher, describe


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


class Tied(nn.Module):
    """A tied weight, a frozen layer, and one that the optimizer will not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.foreign = nn.Linear(2, 1)


def memory_of(flat: FlatParameters, shard: int = 0) -> list[torch.Tensor]:
    region = flat.layout.trained[shard]
    return section_views(region, torch.zeros(region.size_bytes, dtype=torch.uint8))


# -- describe -------------------------------------------------------------------------------------------------------------


def test_variables_stand_in_creation_order_with_their_group_and_tied_ones_once() -> None:
    model = Tied()
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias, model.again.bias]}]
    variables, parameters = describe(model, sgd(groups))
    assert [(v.name, v.shape, v.group) for v in variables] == [
        ("first.weight", (4, 3), 0),
        ("first.bias", (4,), 1),
        ("again.bias", (4,), 1),
        ("frozen.weight", (2, 2), CONSTANT),
        ("frozen.bias", (2,), CONSTANT),
        ("foreign.weight", (1, 2), CONSTANT),
        ("foreign.bias", (1,), CONSTANT),
    ]
    assert parameters[0] is model.again.weight


def test_a_frozen_parameter_that_the_optimizer_knows_is_a_variable() -> None:
    model = Tied()
    variables, _ = describe(model, sgd(model.parameters()))
    assert {v.group for v in variables} == {0}


def test_dtypes_are_named_as_torch_names_them() -> None:
    variables, _ = describe(model := nn.Linear(1, 1, dtype=torch.bfloat16), sgd(model.parameters()))
    assert {v.dtype for v in variables} == {"bfloat16"}


def test_an_optimizer_with_parameters_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the optimizer has 2 parameters that the model does not"):
        describe(nn.Linear(1, 1), sgd(nn.Linear(1, 1).parameters()))


def test_nothing_to_train_is_refused() -> None:
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0]["params"].clear()
    with pytest.raises(ConfigError, match="nothing to train"):
        describe(nn.Linear(1, 1), optimizer)


# -- flat parameters ------------------------------------------------------------------------------------------------------


def make(model: nn.Module, num_shards: int = 1, slice_bytes: int | None = None) -> FlatParameters:
    variables, parameters = describe(model, sgd(model.parameters()))
    return FlatParameters(place(variables, num_shards, slice_bytes=slice_bytes), parameters)


def test_parameters_keep_identity_values_and_shape_and_begin_on_a_cache_line() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    before = [(p, p.detach().clone()) for p in model.parameters()]
    make(model)
    for (parameter, value), now in zip(before, model.parameters(), strict=True):
        assert now is parameter and torch.equal(now.detach(), value)
        assert now.data_ptr() % 16 == 0
    starts = [p.data_ptr() for p in model.parameters()]
    assert [(s - starts[0]) % ALIGN_BYTES for s in starts] == [0] * 4
    assert [s - starts[0] for s in starts] == [
        0,
        64,
        128,
        320,
    ]  # in one buffer, to torch each with a storage of its own
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_with_one_ps_a_pull_is_one_copy_per_dtype() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2, dtype=torch.float64))
    flat = make(model)
    assert len(flat.runs(flat.layout.trained[0], memory_of(flat))) == 2


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("slice_bytes", [None, 1, 50])
def test_what_is_stored_on_the_shards_is_loaded_again(num_shards: int, slice_bytes: int | None) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 16), nn.Linear(16, 2, dtype=torch.float64), nn.Linear(2, 3))
    flat = make(model, num_shards, slice_bytes)
    values = [p.detach().clone() for p in model.parameters()]
    shards = [memory_of(flat, k) for k in range(num_shards)]
    for region, memory in zip(flat.layout.trained, shards, strict=True):
        flat.store(region, memory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(99.0)
    for region, memory in zip(flat.layout.trained, shards, strict=True):
        Puller(flat, region, memory)()
    assert all(torch.equal(p.detach(), v) for p, v in zip(model.parameters(), values, strict=True))


def test_a_slice_that_ends_where_the_next_variable_begins_is_not_copied_with_it() -> None:
    """48 floats over 4 shards are slices of 12, which are padded on the shard and not in the worker."""
    model = nn.ParameterList([nn.Parameter(torch.full((n,), float(n))) for n in (2, 3, 4, 48, 5)])
    flat = make(model, num_shards=4, slice_bytes=100)
    assert flat.layout.shard_of("4") == [3]
    memory = memory_of(flat, 3)
    flat.store(flat.layout.trained[3], memory)
    pieces = flat.layout.trained[3].sections[0].pieces
    assert [memory[0][p.offset : p.offset + p.numel].tolist() for p in pieces] == [[48.0] * 12, [5.0] * 5]


def test_the_padding_stays_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    flat = make(model)
    memory = memory_of(flat)
    flat.store(flat.layout.trained[0], memory)
    inside = sum(int(p.detach().count_nonzero()) for p in model.parameters())
    assert int(memory[0].count_nonzero()) == inside


@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_a_parameter_that_was_moved_is_noticed_by_name(shape: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    flat = make(model)
    assert flat.replaced() == []
    if shape == (5, 7):
        model[1].weight.data = torch.zeros(5, 7)
    else:
        model[1].to(torch.float64)
    with pytest.raises(ConfigError, match=r"parameter 1\.weight was moved after tq\.Session began"):
        flat.replaced()


def test_a_parameter_that_was_given_other_memory_is_taken_back_with_what_it_holds() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    flat = make(model)
    weight = model.get_parameter("1.weight")
    place = weight.data_ptr()
    weight.data = torch.ones(7, 5)
    assert flat.replaced() == [2]
    flat.take_back()
    assert flat.replaced() == [] and weight.data_ptr() == place
    assert torch.equal(weight.detach(), torch.ones(7, 5))


# -- pushing --------------------------------------------------------------------------------------------------------------


def test_gradients_are_copied_and_the_place_of_an_absent_one_is_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    flat = make(model)
    memory = memory_of(flat)
    memory[0].fill_(7.0)
    pusher = Pusher(flat, flat.layout.trained[0], memory)
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    assert pusher() == [2, 3]
    sections = flat.layout.trained[0].sections[0]
    for piece, expected in zip(sections.pieces, [1.0, 1.0, 0.0, 0.0], strict=True):
        assert set(memory[0][piece.offset : piece.offset + piece.numel].tolist()) == {expected}


def test_a_gradient_may_be_sparse_or_of_another_memory_format() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2, 3))])
    flat = make(model)
    memory = memory_of(flat)
    value = torch.arange(12.0).view(4, 3)
    model[0].grad = value.to_sparse()
    model[1].grad = torch.arange(6.0).view(3, 2).t()
    assert Pusher(flat, flat.layout.trained[0], memory)() == []
    first, second = flat.layout.trained[0].sections[0].pieces
    assert torch.equal(memory[0][first.offset :][:12].view(4, 3), value)
    assert torch.equal(memory[0][second.offset :][:6].view(2, 3), torch.arange(6.0).view(3, 2).t())


def test_gradients_in_pieces_are_the_bytes_that_a_copy_would_be() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (1, 7, 33, 64)])
    flat = make(model)
    memory = memory_of(flat)
    pusher = Pusher(flat, flat.layout.trained[0], memory)
    for turn in range(2):
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)
        pieces = pusher.in_pieces()
        assert pieces is not None, turn
        assert pusher.norm() == pytest.approx(torch.cat([p.grad for p in model]).norm().item())
        memory[0].fill_(0.0)
        pusher()
        assert b"".join(pieces) == memory[0].numpy().tobytes()
    model[2].grad[5] = torch.inf
    assert pusher.in_pieces() is not None and pusher.norm() == torch.inf


@pytest.mark.parametrize("other", ["none", "sparse", "transposed", "as it is"])
def test_a_gradient_that_does_not_lie_as_its_parameter_does_is_not_sent_in_pieces(other: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2, 3))])
    flat = make(model)
    pusher = Pusher(flat, flat.layout.trained[0], memory_of(flat))
    model[0].grad = torch.ones(4, 3)
    second = {"none": None, "sparse": torch.ones(2, 3).to_sparse(), "transposed": torch.ones(3, 2).t()}
    model[1].grad = second.get(other, torch.ones(2, 3))
    assert (pusher.in_pieces() is None) == (other in second)


def test_slices_of_a_gradient_go_to_their_shards() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(5, 3))])
    flat = make(model, num_shards=2, slice_bytes=8)
    model[0].grad = torch.arange(15.0).view(5, 3)
    found = []
    for k, region in enumerate(flat.layout.trained):
        memory = memory_of(flat, k)
        Pusher(flat, region, memory)()
        [piece] = region.sections[0].pieces
        found += memory[0][piece.offset :][: piece.numel].tolist()
    assert found == list(range(15))


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.complex64, "parameter w is complex64: .*torch.view_as_complex"),
        (
            torch.int64,
            "parameter w is int64: no gradient can train it; leave it out of the optimizer, or make it a buffer",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(dtype: torch.dtype, said: str) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=dtype.is_complex)
    with pytest.raises(ConfigError, match=said):
        describe(module, torch.optim.SGD(module.parameters(), lr=0.1))
