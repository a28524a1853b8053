"""APMSqueeze learns what Adam learns."""

import data
import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parallel.common import assert_equal_on_all_ranks
from torch import nn

from hvd_compress.torch import APMSqueeze

BETAS = (0.9, 0.98)
FREEZE = 0.15


@pytest.fixture(autouse=True)
def _horovod():
    torch.set_num_threads(1)
    hvd.init()


def train(which, model, lr, steps, batches):
    """Trains; returns Horovod's compression."""
    if which == "adam":
        optimizer, compression = torch.optim.Adam(model.parameters(), lr, BETAS), hvd.Compression.none
    else:
        whole = (nn.Embedding, nn.LayerNorm)
        kept = {id(p) for module in model.modules() if isinstance(module, whole) for p in module.parameters()}
        named = list(model.named_parameters())
        groups = [
            {"params": [(name, p) for name, p in named if id(p) not in kept]},
            {"params": [(name, p) for name, p in named if id(p) in kept], "freeze": False},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = APMSqueeze(groups, lr, BETAS, freeze_step=FREEZE, total_steps=steps)
        compression = optimizer.compression
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / steps))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
    assert_equal_on_all_ranks([p.detach().numpy() for p in model.parameters()], hvd)
    return compression


def loss_of(model, x, y):
    return F.cross_entropy(model(torch.as_tensor(x)).flatten(0, -2), torch.as_tensor(y).flatten())


def compare(make_model, lr, steps, batches, others):
    """Trains with both; returns both losses, and the compression."""
    losses = {}
    for which in ("adam", "apmsqueeze"):
        model = make_model()
        compression = train(which, model, lr, steps, batches())
        model.eval()
        with torch.no_grad():
            losses[which] = np.mean([loss_of(model, x, y).item() for x, y in others])
    if hvd.rank() == 0:
        print(f"loss with Adam {losses['adam']:.4f}, with APMSqueeze {losses['apmsqueeze']:.4f}: ", end="")
        print(f"{100 * (losses['apmsqueeze'] / losses['adam'] - 1):+.2f} %; {compression.stats}")
    return losses["adam"], losses["apmsqueeze"], compression


class Transformer(nn.Module):
    """A language model: what comes next, for every place."""

    def __init__(self, characters, length=64, width=64):
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def test_a_transformer(seed):
    text, other, characters = data.text()
    steps = 500

    def make_model():
        torch.manual_seed(seed)
        return Transformer(characters)

    def batches():
        rng = np.random.default_rng([seed, hvd.rank()])
        return (data.pieces(rng, text, 16) for _ in range(steps))

    others = [data.pieces(np.random.default_rng(5), other, 1000)]
    adam, apmsqueeze, compression = compare(make_model, 1e-2, steps, batches, others)
    assert adam < 2
    assert apmsqueeze < 1.02 * adam
    assert compression.stats.step.ratio > 7


def test_a_cnn(seed):
    steps = 1000

    def make_model():
        torch.manual_seed(seed)
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))

    def batches():
        return ((x.transpose(0, 3, 1, 2), y) for x, y in data.batches([seed, hvd.rank()], steps))

    x, y = data.all_digits()
    adam, apmsqueeze, compression = compare(make_model, 5e-3, steps, batches, [(x.transpose(0, 3, 1, 2), y)])
    assert adam < 1.3
    assert apmsqueeze < 1.02 * adam
    assert compression.stats.step.ratio > 15
