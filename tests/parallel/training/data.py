"""What is trained on: scanned digits with noise, and a text; the same for both frameworks."""

import numpy as np

NOISE = 1.5
"""So much that many digits cannot be told apart: the loss does not go to zero, as that of a text does not."""


def digits():
    """Scanned digits (n, 8, 8, 1) between -1 and 1, and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32), y.astype(np.int64)


def noisy(rng, x):
    return x + NOISE * rng.standard_normal(x.shape).astype(np.float32)


def batches(seed, steps, size=32):
    """Random digits, with other noise in every step."""
    x, y = digits()
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.integers(len(y), size=size)
        yield noisy(rng, x[chosen]), y[chosen]


def all_digits():
    """Each four times, with other noise than in any batch."""
    x, y = digits()
    return noisy(np.random.default_rng(1), np.concatenate([x] * 4)), np.concatenate([y] * 4)


def text():
    """The help on topics that comes with Python, as numbers of characters, the last tenth apart; how many characters."""
    from pydoc_data.topics import topics

    characters = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(characters)))}
    tokens = np.array([numbers[character] for character in characters])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(numbers)


def pieces(rng, tokens, count, length=64):
    """So many random pieces of the text, and the character that follows each of theirs: (count, length) both."""
    starts = rng.integers(len(tokens) - length - 1, size=(count, 1))
    found = tokens[starts + np.arange(length + 1)]
    return found[:, :-1], found[:, 1:]
