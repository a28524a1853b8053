"""What CAT saves: the cost until a target loss, beside that of a fixed T, for every scheme and cost model of its paper.

Multinomial logistic regression, or a small CNN, by gradient descent on all of the data; 4 ranks are simulated in one process,
as in the paper's experiments (Khirirat et al., arXiv 2003.06377): one T for the whole model, chosen by each rank, no error
feedback unless --error-feedback is given. Of the stochastic scheme the step is omega(T) / L, as the paper's formula has it.

    python examples/cat_logistic_regression.py --plot cat.png
    horovodrun -np 2 python examples/cat_logistic_regression.py      # on real ranks: scheme topk, through stock Horovod

scikit-learn's digits are used, or --data: MNIST as .npz (train_images, train_labels), or a file in LIBSVM's format.
"""

import argparse
import copy
import json
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np
import torch

from hvd_compress.codecs import parse
from hvd_compress.codecs.base import Measured
from hvd_compress.vector import Vector

SCHEMES = ("topk", "topk+sign", "stochastic")
FRACTIONS = np.logspace(-4, 0, 13)
PATIENCE = 50
"""A training that takes so many times the steps of a dense one is given up."""


class Run(NamedTuple):
    """One training: its cost in the unit of each cost model until the target loss (inf: not reached), steps and mean T."""

    costs: dict[str, float]
    steps: int
    mean_t: float


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, metavar="FILE", help="MNIST as .npz, or LIBSVM (default: digits)")
    parser.add_argument("--model", choices=("logistic", "cnn"), default="logistic")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ones (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=500, help="of each rank, at most (default: %(default)s)")
    parser.add_argument("--dense-steps", type=int, default=100, help="the target is the loss after so many dense steps")
    parser.add_argument("--error-feedback", action="store_true", help="for the schemes that are not stochastic")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--packets", default="c0=2,c1=1,pmax=128", help="(default: %(default)s)")
    parser.add_argument("--time", default="latency=1e-4,bandwidth=1e7", help="in s and bytes/s (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = ["cost=bits", f"cost=packets,{arguments.packets}", f"cost=time,{arguments.time}"]
    if "HOROVOD_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        rows = Horovod(arguments).compare(costs)
    else:
        rows = Simulation(arguments).compare(costs)
    if rows and arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if rows and arguments.plot:
        plot(rows, arguments.plot)


# --- the problem


def load(path):
    """Samples (N, features), float32, and labels 0, 1, ..."""
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.data / 16, digits.target
    if path.suffix == ".npz":
        data = np.load(path)
        return data["train_images"].reshape(len(data["train_images"]), -1) / 255, data["train_labels"]
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(str(path))
    return x.toarray(), np.unique(y, return_inverse=True)[1]


class Problem:
    """The model, and the part of the data that each rank has."""

    def __init__(self, arguments, ranks):
        x, y = load(arguments.data)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order], dtype=torch.int64)
        self.shards = [(x[r::ranks][: arguments.samples], y[r::ranks][: arguments.samples]) for r in range(ranks)]
        side = math.isqrt(x.shape[1])
        torch.manual_seed(0)
        if arguments.model == "cnn":
            if side**2 != x.shape[1]:
                raise SystemExit(f"--model cnn: samples of {x.shape[1]} features are no images")
            self.model = torch.nn.Sequential(
                torch.nn.Unflatten(1, (1, side, side)),
                torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
                torch.nn.ReLU(),
                torch.nn.Conv2d(8, 16, 3, stride=2, bias=False),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.Linear(16 * ((side - 3) // 2 + 1) ** 2, int(y.max()) + 1, bias=False),
            )
            self.decay, self.lr = 0.0, 0.05  # so small that no coordinate overshoots
        else:
            self.model = torch.nn.Linear(x.shape[1], int(y.max()) + 1, bias=False)
            torch.nn.init.zeros_(self.model.weight)
            self.decay = 1e-3
            largest = max(float(torch.linalg.matrix_norm(shard, 2)) ** 2 / len(shard) for shard, _ in self.shards)
            self.lr = 1 / (0.5 * largest + self.decay)  # 1 / L
        self.first = self.model
        self.reset()

    def reset(self):
        """A model that is untrained, and that no optimizer has its hooks on."""
        self.model = copy.deepcopy(self.first)
        self.parameters = list(self.model.parameters())

    def loss(self, rank):
        x, y = self.shards[rank]
        penalty = sum(p.square().sum() for p in self.parameters) if self.decay else 0
        return torch.nn.functional.cross_entropy(self.model(x), y) + self.decay / 2 * penalty

    def gradient(self, rank):
        """The loss, and its flat gradient."""
        loss = self.loss(rank)
        gradients = torch.autograd.grad(loss, self.parameters)
        return loss.item(), torch.cat([g.flatten() for g in gradients]).numpy()

    def step(self, update):
        """Subtracts a flat vector."""
        for p, part in zip(self.parameters, torch.from_numpy(update).split([p.numel() for p in self.parameters]), strict=True):
            p.data -= part.view_as(p)


# --- ranks that are simulated


class Simulation:
    """All ranks of a training in this process."""

    def __init__(self, arguments):
        self.ranks = arguments.ranks
        self.problem = Problem(arguments, self.ranks)
        self.n = sum(p.numel() for p in self.problem.parameters)
        self.error_feedback = arguments.error_feedback
        self.most_steps = PATIENCE * arguments.dense_steps
        self.target = self.dense(arguments.dense_steps)

    def dense(self, steps):
        """The loss after so many steps without compression."""
        self.problem.reset()
        for _ in range(steps):
            gradients = [self.problem.gradient(rank)[1] for rank in range(self.ranks)]
            self.problem.step(np.float32(self.problem.lr) * np.mean(gradients, 0))
        return float(np.mean([self.problem.gradient(rank)[0] for rank in range(self.ranks)]))

    def compare(self, costs):
        print(f"{self.n} parameters, {self.ranks} simulated ranks, until a loss of {self.target:.4f}")
        print(f"{'scheme':12}{'cost model':42}{'CAT':>10}{'best fixed T':>22}{'CAT / best':>12}{'worst fixed':>12}")
        rows = []
        for scheme in SCHEMES:
            feedback = str(self.error_feedback and scheme != "stochastic").lower()
            spec = f"cat:scheme={scheme},error_feedback={feedback}"
            chosen = {cost: self.run(f"{spec},{cost}", costs) for cost in costs}
            counts = sorted({max(1, round(fraction * self.n)) for fraction in FRACTIONS})
            enough = {cost: 10 * chosen[cost].costs[cost] for cost in costs}
            fixed = {count: self.run(spec, costs, count / self.n, enough) for count in counts}
            for cost in costs:
                rows.append(row_of(scheme, cost, chosen[cost], fixed))
        return rows

    def run(self, spec, costs, fraction=0.0, enough=None):
        """Trains; with that fraction of the elements in every step, where it is given."""
        codec, models = parse(spec), {cost: parse(f"cat:{cost}").cost_options()["cost"] for cost in costs}
        self.problem.reset()
        residuals = [np.zeros(self.n, np.float32) for _ in range(self.ranks)]
        room, total, sent, step = np.empty(codec.max_payload(self.n), np.uint8), dict.fromkeys(costs, 0.0), [], 0
        while True:
            update, losses = np.zeros(self.n, np.float32), []
            spent = dict(total)
            for rank in range(self.ranks):
                loss, gradient = self.problem.gradient(rank)
                losses.append(loss)
                left = np.empty_like(gradient)
                buffers = (Vector.of(residuals[rank]), Vector.of(left)) if codec.has_residual else (None, None)
                part = fraction**4 if codec.scheme == "stochastic" else fraction  # see Measured
                seed, measured = step * self.ranks + rank, Measured(explore=part)
                encoded = codec.encode(Vector.of(gradient), *buffers, seed, Vector.of(room), None, measured)
                residuals[rank] = left
                weight = self.problem.lr * (encoded.improvement if codec.scheme == "stochastic" else 1) / self.ranks
                codec.decode_add(Vector.of(room[: encoded.bytes]), weight, Vector.of(update))
                sent.append(encoded.selected)
                for cost in costs:
                    total[cost] += models[cost].of(encoded.bytes) / self.ranks
            if np.mean(losses) <= self.target:
                return Run(spent, step, float(np.mean(sent)))
            if (
                step >= self.most_steps
                or not np.isfinite(losses).all()
                or (enough and all(total[c] > enough[c] for c in costs))
            ):
                return Run(dict.fromkeys(costs, math.inf), step, float(np.mean(sent)))
            self.problem.step(update)
            step += 1


def row_of(scheme, cost, chosen, fixed):
    """A row of the table, which it prints: CAT, and each fixed T."""
    of_fixed = {count: run.costs[cost] for count, run in fixed.items()}
    best = min(of_fixed, key=of_fixed.get)
    ratio, worst = chosen.costs[cost] / of_fixed[best], max(of_fixed.values()) / chosen.costs[cost]
    beside = f"{of_fixed[best]:.4g} (T = {best})"
    print(f"{scheme:12}{cost:42}{chosen.costs[cost]:10.4g}{beside:>22}{ratio:12.3f}{worst:12.1f}", flush=True)
    return {
        "scheme": scheme,
        "cost": cost,
        "cat": chosen.costs[cost],
        "cat_steps": chosen.steps,
        "cat_mean_t": chosen.mean_t,
        "fixed": of_fixed,
        "fixed_steps": {count: run.steps for count, run in fixed.items()},
        "ratio": ratio,
    }


# --- real ranks


class Horovod:
    """One of the ranks that horovodrun has started."""

    def __init__(self, arguments):
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.problem = Problem(arguments, hvd.size())
        self.n = sum(p.numel() for p in self.problem.parameters)
        self.feedback = str(arguments.error_feedback).lower()
        self.most_steps = PATIENCE * arguments.dense_steps
        self.target = 0.0
        self.target = self.train("none", ["cost=bits"], arguments.dense_steps)[0]

    def compare(self, costs):
        """The rows, on rank 0."""
        if self.hvd.rank() == 0:
            print(f"{self.n} parameters, {self.hvd.size()} ranks, until a loss of {self.target:.4f}")
        cat = f"cat:scope=model,error_feedback={self.feedback}"
        chosen = {cost: self.train(f"{cat},{cost}", costs)[1] for cost in costs}
        fractions = [fraction for fraction in FRACTIONS if fraction * self.n >= 1]
        fixed = {}
        for fraction in fractions:
            run = self.train(f"topk:fraction={fraction:.3g},error_feedback={self.feedback}", costs)[1]
            fixed[round(fraction * self.n)] = run
        return [row_of("topk", cost, chosen[cost], fixed) for cost in costs] if self.hvd.rank() == 0 else []

    def train(self, spec, costs, steps=None):
        """The last loss, and the run."""
        from hvd_compress.torch import Compression

        hvd, problem, steps = self.hvd, self.problem, steps or self.most_steps
        problem.reset()
        named = list(problem.model.named_parameters())
        compression = Compression.from_spec(spec, named, min_numel=0, exchange="allgather")
        optimizer = torch.optim.SGD(problem.parameters, lr=problem.lr)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
        models = {cost: parse(f"cat:{cost}").cost_options()["cost"] for cost in costs}
        total, sent = dict.fromkeys(costs, 0.0), []
        for step in range(steps):
            optimizer.zero_grad()
            loss = problem.loss(hvd.rank())
            mean = float(hvd.allreduce(loss.detach(), name="loss"))
            if mean <= self.target:
                return mean, Run(total, step, float(np.mean(sent)))
            loss.backward()
            optimizer.step()
            sent.append(compression.stats.step.selected or 0)
            for cost in costs:
                total[cost] += models[cost].of(compression.stats.step.payload_bytes)
        return float(hvd.allreduce(problem.loss(hvd.rank()).detach(), name="loss")), Run(
            dict.fromkeys(costs, math.inf), steps, 0.0
        )


def plot(rows, path):
    """The cost of each fixed T, and CAT's, in a panel for each scheme and cost model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    schemes, costs = list(dict.fromkeys(r["scheme"] for r in rows)), list(dict.fromkeys(r["cost"] for r in rows))
    figure, axes = plt.subplots(
        len(schemes), len(costs), figsize=(3.6 * len(costs), 2.5 * len(schemes)), sharex=True, squeeze=False
    )
    for row in rows:
        axis = axes[schemes.index(row["scheme"])][costs.index(row["cost"])]
        points = [(int(count), cost) for count, cost in row["fixed"].items() if math.isfinite(cost)]
        axis.loglog(*zip(*points, strict=True), "o-", ms=3, label="fixed T")
        axis.axhline(row["cat"], color="C1", label="CAT")
        axis.set_title(f"{row['scheme']}, {row['cost'].split(',')[0]}", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_ylim(top=row["cat"] * 30)
    for axis in axes[-1]:
        axis.set_xlabel("T", fontsize=9)
    for line in axes:
        line[0].set_ylabel("cost until the target", fontsize=9)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
