"""The shapes of models' gradients, in the order of their forward pass: what a benchmark needs of a model, without the model."""

from __future__ import annotations

from collections.abc import Callable

DENSE, RIVALS = ("none", "fp16", "bf16"), ("ddp", "ddp:fp16")
"""What every benchmark of a step has, and PyTorch's own DistributedDataParallel."""
Shapes = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of parameters."""


def resnet50() -> Shapes:
    """ResNet-50 for 1000 classes, as torchvision has it: 25.6 million parameters in 161 tensors."""
    shapes: Shapes = [("conv1.weight", (64, 3, 7, 7)), *_batch_norm("bn1", 64)]
    width_in = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for conv, shape in enumerate(((width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), start=1):
                shapes += [(f"{name}.conv{conv}.weight", shape), *_batch_norm(f"{name}.bn{conv}", shape[0])]
            if block == 0:
                shapes += [(f"{name}.downsample.0.weight", (4 * width, width_in, 1, 1))]
                shapes += _batch_norm(f"{name}.downsample.1", 4 * width)
            width_in = 4 * width
    return [*shapes, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]


def bert_base() -> Shapes:
    """BERT-base, uncased: 109.5 million parameters in 199 tensors."""
    hidden = 768
    shapes: Shapes = [
        ("embeddings.word.weight", (30522, hidden)),
        ("embeddings.position.weight", (512, hidden)),
        ("embeddings.type.weight", (2, hidden)),
        *_norm("embeddings.norm", hidden),
    ]
    for layer in range(12):
        name = f"layer.{layer}"
        for part in ("query", "key", "value", "output"):
            shapes += _linear(f"{name}.attention.{part}", hidden, hidden)
        shapes += _norm(f"{name}.attention.norm", hidden)
        shapes += [*_linear(f"{name}.up", hidden, 4 * hidden), *_linear(f"{name}.down", 4 * hidden, hidden)]
        shapes += _norm(f"{name}.norm", hidden)
    return [*shapes, *_linear("pooler", hidden, hidden)]


def lstm() -> Shapes:
    """A language model of words, two LSTM layers of 650 over 10,000 words: 19.8 million parameters in 11 tensors."""
    hidden, words = 650, 10_000
    shapes: Shapes = [("embedding.weight", (words, hidden))]
    for layer in range(2):
        for part in ("ih", "hh"):
            shapes += [
                (f"lstm.weight_{part}_l{layer}", (4 * hidden, hidden)),
                (f"lstm.bias_{part}_l{layer}", (4 * hidden,)),
            ]
    return [*shapes, *_linear("decoder", hidden, words)]


def mlp() -> Shapes:
    """Three fully connected layers, 784 to 4096 to 4096 to 10: 20 million parameters in 6 tensors."""
    return [*_linear("0", 784, 4096), *_linear("2", 4096, 4096), *_linear("4", 4096, 10)]


MODELS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "bert-base": bert_base, "lstm": lstm, "mlp": mlp}


def _linear(name: str, wide_in: int, wide_out: int) -> Shapes:
    return [(f"{name}.weight", (wide_out, wide_in)), (f"{name}.bias", (wide_out,))]


def _norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


_batch_norm = _norm
