"""Nothing is lost: what was sent and what is left make the sum of the gradients, however the optimizer is called."""

import contextlib

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, compressed, distributed, random
from parallel.common import WITH_RESIDUAL

pytestmark = pytest.mark.parametrize("spec", WITH_RESIDUAL)


class Books:
    """Sums up the gradients that went in and the results that came out."""

    def __init__(self, model):
        self.model = model
        self.gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.results = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def backward(self, step):
        grads = {name: random(*p.shape, step=step) for name, p in self.model.named_parameters()}
        self.model.backward(**grads)
        for name, grad in grads.items():
            self.gradients[name] += grad

    def take(self, *names):
        for name, p in self.model.named_parameters():
            if not names or name in names:
                self.results[name] += p.grad

    def balance(self, compression):
        state = compression.state_dict()
        for name, total in self.gradients.items():
            left = total - state["residuals"][name]
            if name in state["piece_residuals"]:  # of the mean
                begin, piece = state["piece_residuals"][name]
                left.view(-1)[begin : begin + piece.numel()] -= hvd.size() * piece
            left = hvd.allreduce(left, name=f"balance.{name}")
            torch.testing.assert_close(self.results[name], left, rtol=0, atol=5e-5)


def start(spec, **options):
    model = Vectors(a=(40, 40), b=(50, 30))
    return model, Books(model), *distributed(model, spec, **options)


def test_ordinary_steps(spec):
    _, books, optimizer, compression = start(spec)
    for step in range(6):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.step()
        books.take()
    books.balance(compression)


def test_a_loop_of_hvd_allreduce(spec):
    model = Vectors(a=(40, 40), b=(50, 30))
    books, compression = Books(model), compressed(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        books.backward(step)
        for name, p in model.named_parameters():
            p.grad = hvd.allreduce(p.grad, name=name, compression=compression)
        optimizer.step()
        books.take()
    books.balance(compression)


def test_one_compression_for_two_optimizers_and_a_common_backward(spec):
    model = Vectors(a=(40, 40), b=(50, 30))
    books, compression = Books(model), compressed(model, spec)
    optimizers = {
        name: hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1), [(name, p)], compression)
        for name, p in model.named_parameters()
    }
    for step in range(6):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        books.backward(step)
        for name, optimizer in optimizers.items():
            optimizer.step()
            books.take(name)
        assert_equal_on_all_ranks(model.parameters())
    books.balance(compression)


def test_several_synchronizations_for_one_step(spec):
    """The second one sends the first one's mean once more, as Horovod itself does."""
    _, books, optimizer, compression = start(spec)
    for step in range(6):
        optimizer.zero_grad()
        books.backward(2 * step)
        optimizer.synchronize()
        books.backward(2 * step + 1)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        books.take()
    books.balance(compression)


def test_set_codec_between_synchronize_and_step(spec):
    _, books, optimizer, compression = start(spec)
    for step in range(6):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.synchronize()
        if step == 3:
            compression.set_codec("adacomp:bin=50")
        with optimizer.skip_synchronize():
            optimizer.step()
        books.take()
    books.balance(compression)


def test_updates_without_an_optimizer(spec):
    model, books, optimizer, compression = start(spec)
    for step in range(6):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.synchronize()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
        books.take()
    books.balance(compression)


@pytest.mark.parametrize("in_place", [False, True], ids=["to_none", "to_zero"])
def test_results_that_the_user_throws_away(spec, in_place):
    """A step that is skipped by the user's own rule is as if it had not been.

    Where the gradient is zeroed in place, that cannot be told from one that is accumulated further: nothing is undone.
    """
    model, books, optimizer, compression = start(spec)
    for step in range(6):
        model.zero_grad(set_to_none=not in_place)
        skip = step == 3
        with contextlib.nullcontext() if not skip or in_place else _off_the_books(books):
            books.backward(step)
        optimizer.synchronize()
        if not skip or in_place:
            books.take()
        if not skip:
            with optimizer.skip_synchronize():
                optimizer.step()
    books.balance(compression)


@contextlib.contextmanager
def _off_the_books(books):
    gradients = {name: g.clone() for name, g in books.gradients.items()}
    yield
    books.gradients = gradients


def test_frozen_parameters_stay(spec):
    model, books, optimizer, compression = start(spec)
    for step in range(3):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.step()
        books.take()
    model.a.requires_grad_(False)
    frozen, residual = model.a.detach().clone(), compression.state_dict()["residuals"]["a"]
    for step in range(3):
        optimizer.zero_grad()
        model.backward(b=random(50, 30, step=step))
        optimizer.step()
    assert torch.equal(model.a, frozen)
    assert torch.equal(compression.state_dict()["residuals"]["a"], residual)
    model.a.requires_grad_(True)


def test_frozen_parameters_residual_survives_a_step_that_is_undone(spec):
    model, books, optimizer, compression = start(spec)
    for step in range(3):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.step()
    model.a.requires_grad_(False)
    residuals = compression.state_dict()["residuals"]
    for bad in (True, True, False):
        optimizer.zero_grad()
        model.backward(b=random(50, 30) * (float("inf") if bad and hvd.rank() == 0 else 1))
        optimizer.synchronize()
        after = compression.state_dict()["residuals"]
        assert torch.equal(after["a"], residuals["a"])
        if bad:
            assert torch.equal(after["b"], residuals["b"])
    model.a.requires_grad_(True)


def test_leftover_of_the_codec_before(spec):
    """It is sent in the first step that counts; not in one that is undone, and not while the parameter is frozen."""
    model, books, optimizer, compression = start(spec)
    for step in range(3):
        optimizer.zero_grad()
        books.backward(step)
        optimizer.step()
        books.take()
    compression.set_codec("none")
    residuals = compression.state_dict()["residuals"]

    optimizer.zero_grad()
    model.backward(a=random(40, 40), b=random(50, 30) * (float("inf") if hvd.rank() == 0 else 1))
    optimizer.synchronize()
    after = compression.state_dict()["residuals"]
    assert all(torch.equal(after[name], residual) for name, residual in residuals.items())

    model.a.requires_grad_(False)
    optimizer.zero_grad()
    model.backward(b=torch.zeros(50, 30))
    optimizer.step()
    books.take("b")
    assert not model.a.grad.any()
    assert compression.state_dict()["residuals"].keys() == {"a"}

    model.a.requires_grad_(True)
    optimizer.zero_grad()
    model.backward(a=torch.zeros(40, 40), b=torch.zeros(50, 30))
    optimizer.step()
    books.take()
    for name, total in books.gradients.items():
        torch.testing.assert_close(books.results[name], hvd.allreduce(total, name=f"total.{name}"), rtol=0, atol=5e-5)
