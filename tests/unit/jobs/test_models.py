"""The built-in models and their evaluation."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchquorum.data import Split, load_mnist
from torchquorum.data.batches import Batches
from torchquorum.errors import ConfigError
from torchquorum.jobs.models import CNN, MLP, MODELS, Softmax, evaluate, make_model


@pytest.fixture(scope="module")
def digits() -> Split:
    test = load_mnist().test
    return Split(test.images[:250], test.labels[:250])


@pytest.mark.parametrize(
    ("name", "kind", "parameters"), [("softmax", Softmax, 7_850), ("mlp", MLP, 397_510), ("cnn", CNN, 1_663_370)]
)
def test_each_model_has_its_size_and_gives_ten_logits(name: str, kind: type, parameters: int, digits: Split) -> None:
    model = make_model(name)
    assert type(model) is kind
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(digits.inputs(torch.arange(3))).shape == (3, 10)


def test_the_mlp_names_its_layers_fc1_and_fc2() -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in MLP().named_parameters()}
    assert shapes == {"fc1.weight": (500, 784), "fc1.bias": (500,), "fc2.weight": (10, 500), "fc2.bias": (10,)}


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_of_torch_decides_the_first_weights(name: str) -> None:
    models = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        models.append(nn.utils.parameters_to_vector(make_model(name).parameters()))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_lower_the_loss_of_each_model(name: str, digits: Split) -> None:
    torch.manual_seed(0)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, _ = evaluate(model, digits)
    batches = Batches(digits, 50)
    for _ in range(15):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    after, _ = evaluate(model, digits)
    assert after < 0.95 * before


def test_dropout_of_the_cnn_works_in_training_only_and_can_be_switched_off(digits: Split) -> None:
    images = digits.inputs(torch.arange(4))
    model = CNN()
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), model(images))
    certain = CNN(dropout=0)
    assert torch.equal(certain(images), certain(images))


@pytest.mark.parametrize(("given", "near"), [("mpl", "mlp"), ("MLP", "mlp"), ("softmx", "softmax"), ("cnn2", "cnn")])
def test_an_unknown_model_is_refused_with_the_nearest_name(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"model='{given}': .*softmax, mlp, cnn; did you mean '{near}'\?"):
        make_model(given)


def test_a_name_near_to_none_gets_the_list_alone() -> None:
    with pytest.raises(ConfigError, match=r"must be one of softmax, mlp, cnn$"):
        make_model("transformer")


@pytest.mark.parametrize("batch_size", [1, 7, 250, 1000])
def test_evaluate_gives_mean_loss_and_accuracy_whatever_the_batch_size(digits: Split, batch_size: int) -> None:
    torch.manual_seed(0)
    model = MLP()
    loss, accuracy = evaluate(model, digits, batch_size=batch_size)
    inputs, labels = digits.tensors()
    logits = model(inputs)
    assert loss == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == (logits.argmax(1) == labels).double().mean().item()


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_uses_eval_mode_and_leaves_every_module_in_its_own(digits: Split, training: bool) -> None:
    model = CNN()
    model.train(training)
    model.dropout.train(not training)
    assert evaluate(model, digits) == evaluate(model, digits)
    assert model.training is training
    assert model.fc1.training is training
    assert model.dropout.training is not training


def test_evaluate_restores_the_mode_when_the_model_fails(digits: Split) -> None:
    model = nn.Linear(3, 10)
    with pytest.raises(RuntimeError):
        evaluate(model, digits)
    assert model.training


def test_evaluate_leaves_gradients_alone(digits: Split) -> None:
    model = Softmax()
    evaluate(model, digits)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluate_refuses_an_empty_split_and_a_batch_below_one(digits: Split) -> None:
    with pytest.raises(ConfigError, match="split: has no images"):
        evaluate(Softmax(), Split(digits.images[:0], digits.labels[:0]))
    with pytest.raises(ConfigError, match="batch_size=0: must be 1 or more"):
        evaluate(Softmax(), digits, batch_size=0)
