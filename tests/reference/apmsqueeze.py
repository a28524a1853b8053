"""APMSqueeze (Tang et al., arXiv 2008.11343, algorithm 1) on one parameter, with n simulated ranks, in float64."""

import numpy as np


def compress(u, scale="l2"):
    """C(u): one sign an element, sign(0) = +1, times ||u||_2 / sqrt(N), or the mean magnitude; of no elements: none."""
    if u.size == 0:
        return u.copy()
    size = np.sqrt(np.mean(u**2)) if scale == "l2" else np.mean(np.abs(u))
    return np.where(u < 0, -size, size)


class Ranks:
    """All ranks' training of one flat parameter.

    Args:
        x: Where it begins, (N,).
        ranks: n.
        pieces: Of the parameter, (begin, end) of each owner that has one; None: every rank gets the payloads of all
            (allgather), and their mean is not compressed again.
        lr, beta1, beta2, eps, weight_decay: The optimizer's.
        freeze_step: T_w.
        scale: Of `compress`; None: nothing is compressed.
    """

    def __init__(self, x, ranks, pieces, lr, beta1, beta2, eps, weight_decay, freeze_step, scale="l2"):
        self.x = np.array(x, np.float64)
        self.ranks, self.pieces, self.scale = ranks, pieces, scale
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay
        self.freeze_step, self.t = freeze_step, 0
        self.m = np.zeros_like(self.x)
        self.v = np.zeros_like(self.x)
        self.worker = [np.zeros_like(self.x) for _ in range(ranks)]  # d_i
        self.server = np.zeros_like(self.x)  # D, all owners' together

    def step(self, gradients):
        """One step; gradients of each rank, (N,)."""
        gradients = [np.asarray(g, np.float64) for g in gradients]
        self.t += 1
        if self.t <= self.freeze_step:
            g = sum(gradients) / self.ranks
            self.m = self.beta1 * self.m + (1 - self.beta1) * g
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        else:
            self.m = self._exchanged([self.beta1 * self.m + (1 - self.beta1) * g for g in gradients])
        self.x *= 1 - self.lr * self.weight_decay
        moves = np.ones_like(self.x, bool) if self.t <= self.freeze_step else self.v > 0
        change = self.m / (np.sqrt(self.v) + self.eps)
        if self.t > self.freeze_step:  # no further than without the freeze: by Cauchy-Schwarz over all gradients so far
            bound = (1 - self.beta1) / np.sqrt((1 - self.beta2) * (1 - self.beta1**2 / self.beta2))
            change = np.clip(change, -bound, bound)
        self.x[moves] -= self.lr * change[moves]

    def _exchanged(self, momenta):
        if self.scale is None:
            return sum(momenta) / self.ranks
        sent = []
        for i, momentum in enumerate(momenta):
            u = momentum + self.worker[i]
            sent.append(compress(u, self.scale))
            self.worker[i] = u - sent[-1]
        mean = sum(sent) / self.ranks
        if self.pieces is None:
            return mean
        result = np.zeros_like(mean)
        for begin, end in self.pieces:
            a = mean[begin:end] + self.server[begin:end]
            result[begin:end] = compress(a, self.scale)
            self.server[begin:end] = a - result[begin:end]
        return result
