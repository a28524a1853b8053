"""What TensorBoard gets of a compression's stats, in both frameworks."""

from __future__ import annotations

import math

from hvd_compress.stats import Stats

TAG = "hvd_compress"


def scalars(stats: Stats) -> dict[str, float]:
    """The numbers of the last step by tag, of this rank; those that there are."""
    step = stats.step
    found: dict[str, float] = {
        "ratio": step.ratio,
        "bytes_dense": step.bytes_dense,
        "bytes_sent": step.bytes_sent,
        "payload_bytes": step.payload_bytes,
        "encode_s": step.encode_s,
        "wait_s": step.wait_s,
        "decode_s": step.decode_s,
        "residual_norm": step.residual_norm,
    }
    if step.selected is not None:
        found["selected"] = step.selected
    if step.energy:
        found |= {"improvement": step.improvement, "improvement_per_bit": step.improvement_per_bit}
    if stats.network is not None:
        found |= {"network/latency": stats.network.latency, "network/bandwidth": stats.network.bandwidth}
    return found


def histograms(stats: Stats) -> dict[str, list[float]]:
    """Numbers that each compressed parameter has one of, of the last step, by tag."""
    compressed = [counters for counters in stats.step.parameters.values() if counters.payload_bytes]
    found = {
        "parameters/ratio": [counters.ratio for counters in compressed],
        "parameters/residual_norm": [counters.residual_norm for counters in compressed if counters.residual_sq],
        "parameters/encode_s": [counters.encode_s for counters in compressed],
    }
    # TensorBoard has no place for what is not finite, and a look at a training should not end it.
    finite = {tag: list(filter(math.isfinite, values)) for tag, values in found.items()}
    return {tag: values for tag, values in finite.items() if values}
