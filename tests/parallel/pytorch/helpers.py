"""Models, gradients and optimizers."""

import horovod.torch as hvd
import torch
from parallel import common

from hvd_compress.torch import Compression


def gather(value):
    return common.gather(value, hvd)


def assert_equal_on_all_ranks(tensors):
    common.assert_equal_on_all_ranks([t.detach().to(torch.float64).numpy() for t in tensors], hvd)


def convnet(dtype=torch.float32, memory_format=torch.contiguous_format):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 16, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 20),
    )
    return model.to(dtype).to(memory_format=memory_format)


def batch(step, dtype=torch.float32, rank=None, size=16):
    """Another one on every rank and in every step; the label can be learned."""
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    x = torch.randn(size, 2, 8, 8, generator=generator)
    return x.to(dtype), x.flatten(1)[:, :20].argmax(1)


def loss_of(model, step, dtype=torch.float32):
    x, y = batch(step, dtype)
    return torch.nn.functional.cross_entropy(model(x).float(), y)


EXCHANGE = "auto"
"""That `compressed` and `distributed` take by default; every test is run with several, see conftest.py."""


def compressed(model, spec, prefix="", **options):
    return Compression.from_spec(spec, model.named_parameters(prefix), **{"exchange": EXCHANGE, **options})


def distributed(model, spec, lr=0.05, optimizer_options=None, prefix="", **options):
    """An SGD optimizer on Horovod, and its compression."""
    compression = compressed(model, spec, prefix, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(prefix),
        compression=compression,
        **(optimizer_options or {}),
    )
    return optimizer, compression


class Vectors(torch.nn.Module):
    """Parameters whose gradients are what the test says."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def backward(self, **gradients):
        sum((getattr(self, name) * g).sum() for name, g in gradients.items()).backward()


def random(*shape, step=0, rank=None):
    generator = torch.Generator().manual_seed(77 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(*shape, generator=generator)
