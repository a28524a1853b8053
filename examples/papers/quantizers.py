"""NUQSGD (Ramezani-Kebrya et al., arXiv 1908.06077), QSGD and QSGDinf: a residual network on CIFAR-10.

Run it on two processes of this machine, which takes minutes::

    horovodrun -np 2 python examples/papers/quantizers.py --data FOLDER

The paper claims that NUQSGD, whose variance is bounded, trains no worse than QSGDinf, which is the practical choice of the
others, at the same number of bits.
"""

import horovod.torch as hvd
import torch
from experiment import Task, classification, images, parse_args, run
from torch import nn

SPECS = ["none", *(f"{codec}:bits={bits}" for bits in (3, 4) for codec in ("nuqsgd", "qsgdinf", "qsgd"))]


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(wide_in, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide))
        self.shortcut = nn.Conv2d(wide_in, wide, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet(blocks: int, classes: int) -> nn.Module:
    """With 6 `blocks` + 2 layers: ResNet-8, ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    wide_in = 16
    for wide in (16, 32, 64):
        for block in range(blocks):
            layers.append(Block(wide_in, wide, 2 if block == 0 and wide > 16 else 1))
            wide_in = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    args = parse_args(__doc__, ["cifar10-resnet"], SPECS)

    def cifar10() -> Task:
        data = images(args.data, "cifar10")
        blocks, epochs = (3, 40) if args.full else (1, 6)
        return classification(data, lambda: resnet(blocks, 10), epochs, lr=0.1, flip=True)

    run({"cifar10-resnet": cifar10}, args)


if __name__ == "__main__":
    main()
