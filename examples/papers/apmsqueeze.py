"""APMSqueeze (Tang et al., arXiv 2008.11343): a language model with Adam and with APMSqueeze.

Run it on two processes of this machine, which takes minutes::

    horovodrun -np 2 python examples/papers/apmsqueeze.py --data FOLDER

The abstract claims Adam's convergence with up to 97 % fewer bytes in the compressed stage; the first 15 % of the steps are
dense, as in the paper.
"""

import horovod.torch as hvd
import torch
from experiment import Task, language, parse_args, run, text
from torch import nn

from hvd_compress.torch import APMSqueeze, Compression

SPECS = ["adam", "apmsqueeze"]
FREEZE = 0.15
BETAS = (0.9, 0.98)
STEPS = 100  # an epoch


class GPT(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.token(x) + self.place.weight[: x.shape[1]]
        return self.out(self.norm(self.layers(hidden, mask=self.mask)))


def optimizer_of(model: nn.Module, spec: str, steps: int, lr: float) -> tuple[object, object]:
    """Horovod's, and its compression; a spec that is none of SPECS is the codec of APMSqueeze's momentum."""
    if spec == "adam":
        compression = Compression.none(model.named_parameters())
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr, BETAS)
    else:
        codec = "l2" if spec == "apmsqueeze" else spec
        optimizer = APMSqueeze(model.named_parameters(), lr, betas=BETAS, freeze_step=FREEZE, total_steps=steps, codec=codec)
        compression = optimizer.compression
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression), compression


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    args = parse_args(__doc__, ["language-model"], SPECS)

    def language_model() -> Task:
        data = text(args.data)
        width, layers, epochs = (256, 4, 100) if args.full else (128, 2, 15)
        return language(
            data,
            lambda: GPT(data.characters, 64, width, layers),
            epochs,
            lambda model, spec: optimizer_of(model, spec, epochs * STEPS, lr=2e-3),
            steps=STEPS,
        )

    run({"language-model": language_model}, args)


if __name__ == "__main__":
    main()
