"""AdaComp (Chen et al., AAAI 2018, arXiv 1712.02679): one step on one flat layer, and the words it sends."""

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Step(NamedTuple):
    """Result of one step on a layer of N elements in B = ceil(N / bin) bins."""

    selected: NDArray[np.bool_]
    """Which elements are sent, (N,)."""
    gmax: NDArray[np.float64]
    """max |G| of each bin, (B,)."""
    scale: float
    """Mean of gmax over all bins; 0 where there are none."""
    sent: NDArray[np.float64]
    """sign(G) * scale on the selected elements, else 0, (N,)."""
    residual: NDArray[np.float64]
    """G - sent: what stays for the next step, (N,)."""


def step(residual: ArrayLike, gradient: ArrayLike, bin: int, c: float = 2.0) -> Step:
    """Select, quantize and keep the rest.

    G = R + dW and H = G + (c - 1) dW; element j is selected iff |H_j| >= gmax[bin(j)]. A bin whose gmax is 0 sends
    nothing, and neither does an element whose G is 0, since sign(0) = 0.

    Args:
        residual: R, (N,).
        gradient: dW, (N,).
        bin: L_T, the elements in a bin; the last bin may be short.
        c: soft threshold scale factor.
    """
    residual = np.asarray(residual, dtype=np.float64)
    gradient = np.asarray(gradient, dtype=np.float64)
    total = residual + gradient
    soft = total + (c - 1.0) * gradient

    starts = range(0, total.size, bin)
    gmax = np.array([np.abs(total[start : start + bin]).max() for start in starts], dtype=np.float64)
    scale = float(gmax.mean()) if gmax.size else 0.0

    threshold = gmax[np.arange(total.size) // bin]
    selected = (np.abs(soft) >= threshold) & (threshold > 0) & (total != 0)
    sent = np.where(selected, np.sign(total) * scale, 0.0)
    return Step(selected, gmax, scale, sent, total - sent)


def payload(step: Step, bin: int) -> bytes:
    """Little-endian wire form of a step: float32 scale, then the words of each bin in order.

    A selected element is one word: its index in the bin, a bit that marks the last word of the bin, and the sign
    (1 = negative). A word has 8 bits (6-bit index) where bin < 64, else 16 (14-bit index). An empty bin is one word
    with all index bits set, last set and the sign clear. A layer with nothing selected has no words.
    """
    index_bits, word_format = (6, "<B") if bin < 64 else (14, "<H")
    last, sign, empty = 1 << index_bits, 1 << (index_bits + 1), (1 << index_bits) - 1
    if bin > empty:
        raise ValueError(f"a bin of {bin} elements does not fit a {index_bits}-bit index")

    words = []
    for start in range(0, step.selected.size, bin):
        chosen = np.flatnonzero(step.selected[start : start + bin])
        bin_words = [int(i) | (sign if step.sent[start + i] < 0 else 0) for i in chosen] or [empty]
        bin_words[-1] |= last
        words += bin_words
    if not step.selected.any():
        words = []
    return struct.pack("<f", step.scale) + b"".join(struct.pack(word_format, word) for word in words)
