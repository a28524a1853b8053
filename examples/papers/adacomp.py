"""AdaComp (Chen et al., arXiv 1712.02679): dense and compressed training of convnets and of a recurrent network.

Run it on two processes of this machine, which takes minutes::

    horovodrun -np 2 python examples/papers/adacomp.py --data FOLDER

The abstract claims about 200 times fewer bytes for fully connected and recurrent layers, about 40 for convolutions, and no
loss of accuracy.
"""

import horovod.torch as hvd
import torch
from experiment import Task, classification, images, language, parse_args, run, sgd, text
from torch import nn

SPECS = ["none", "adacomp"]


def mnist_cnn(classes: int) -> nn.Module:
    """Two convolutions, two fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 256),
        nn.ReLU(),
        nn.Linear(256, classes),
    )


def cifar_cnn(classes: int) -> nn.Module:
    """Three convolutions and a fully connected layer, as the paper's of Caffe."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


class CharLSTM(nn.Module):
    """Two LSTM layers over characters."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    args = parse_args(__doc__, ["mnist-cnn", "cifar10-cnn", "char-lstm"], SPECS)

    def mnist() -> Task:
        data = images(args.data, "mnist")
        return classification(data, lambda: mnist_cnn(10), 40 if args.full else 10, lr=0.02)

    def cifar10() -> Task:
        data = images(args.data, "cifar10")
        return classification(data, lambda: cifar_cnn(10), 60 if args.full else 20, lr=0.02, flip=True)

    def char_lstm() -> Task:
        data = text(args.data)
        width, epochs = (512, 100) if args.full else (256, 24)
        return language(data, lambda: CharLSTM(data.characters, width), epochs, lambda model, spec: sgd(model, spec, lr=1.0))

    run({"mnist-cnn": mnist, "cifar10-cnn": cifar10, "char-lstm": char_lstm}, args)


if __name__ == "__main__":
    main()
