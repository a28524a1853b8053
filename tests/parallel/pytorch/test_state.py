"""compression.state_dict() and load_state_dict()."""

import copy
import io

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, convnet, distributed, loss_of, random


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def saved(value):
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "spec", ["adacomp", "qsgd:bits=2", "nuqsgd:bits=4,error_feedback=true", "randomk", "cat:scheme=topk+sign,cost=packets"]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_resumed_run_is_bitwise_the_run_that_never_stopped(spec, memory_format):
    model = convnet(memory_format=memory_format)
    optimizer, compression = distributed(model, spec, seed=3)
    train(model, optimizer, 4)
    state = saved([model.state_dict(), optimizer.state_dict(), compression.state_dict()])
    train(model, optimizer, 4, first=4)

    again = convnet(memory_format=memory_format)
    optimizer, compression_again = distributed(again, spec)
    again.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    compression_again.load_state_dict(state[2])
    train(again, optimizer, 4, first=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    residuals = compression.state_dict()["residuals"]
    assert residuals.keys() == compression_again.state_dict()["residuals"].keys()
    for name, residual in compression_again.state_dict()["residuals"].items():
        assert torch.equal(residual, residuals[name])
    assert_equal_on_all_ranks(again.parameters())


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("world_size", 64, "world size is 64"),
        ("rank", 63, "rank is 63"),
        ("spec", "qsgd:bits=4,bucket=512", "spec is 'qsgd:bits=4,bucket=512', here it is 'adacomp:c=2'"),
        ("parameters", {"w": [[41, 40], "adacomp:bin=500,c=2"]}, "parameter 'w'"),
        ("parameters", {}, "parameter 'w' is not there in it"),
    ],
)
def test_state_of_another_run(key, value, text):
    model = Vectors(w=(40, 40))
    optimizer, compression = distributed(model, "adacomp")
    model.backward(w=random(40, 40))
    optimizer.step()
    state = {**compression.state_dict(), key: value}
    if key == "parameters":
        state["residuals"] = {}
    before = compression.state_dict()["residuals"]["w"]
    with pytest.raises(ValueError, match=text):
        compression.load_state_dict(state)
    assert torch.equal(compression.state_dict()["residuals"]["w"], before)
    with pytest.warns(UserWarning, match=r"The residuals restart at zero"):
        compression.load_state_dict(state, strict=False)
    assert compression.state_dict()["residuals"] == {}
    optimizer.zero_grad()
    model.backward(w=random(40, 40))
    optimizer.step()


def test_format_of_another_version_is_refused():
    _, compression = distributed(Vectors(w=(40, 40)), "adacomp")
    with pytest.raises(ValueError, match="format 99"):
        compression.load_state_dict({**compression.state_dict(), "format": 99})


def test_state_belongs_to_the_rank_and_is_a_copy():
    model = Vectors(w=(40, 40))
    optimizer, compression = distributed(model, "adacomp")
    model.backward(w=random(40, 40))
    optimizer.step()
    state = compression.state_dict()
    assert state["rank"] == hvd.rank()
    kept = copy.deepcopy(state["residuals"]["w"])
    optimizer.zero_grad()
    model.backward(w=random(40, 40, step=1))
    with pytest.raises(RuntimeError, match="between backward and"):
        compression.state_dict()
    optimizer.step()
    assert torch.equal(state["residuals"]["w"], kept)


def test_state_between_synchronize_and_step_is_of_the_parameters_as_they_are():
    """The step is not made yet, so the saved residuals are those before it; the running job goes on undisturbed."""

    def run(save):
        model = Vectors(w=(40, 40))
        optimizer, compression = distributed(model, "adacomp")
        residuals = []
        for step in range(4):
            optimizer.zero_grad()
            model.backward(w=random(40, 40, step=step))
            optimizer.synchronize()
            if save and step == 3:
                residuals.append(compression.state_dict()["residuals"]["w"])
            with optimizer.skip_synchronize():
                optimizer.step()
            if step >= 2:
                residuals.append(compression.state_dict()["residuals"]["w"])
        return model.w.detach(), residuals

    weights, (before, after) = run(save=False)
    again, (kept, between, last) = run(save=True)
    assert torch.equal(weights, again)
    assert torch.equal(before, kept)
    assert torch.equal(before, between)
    assert torch.equal(after, last)
