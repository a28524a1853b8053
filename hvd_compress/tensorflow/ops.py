"""Encode and decode as TensorFlow ops, over the same kernels as everywhere: the same bytes."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_compress.codecs import Codec

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
"""The dtypes that a gradient can have."""


class Encoded(NamedTuple):
    """What one encoding gave, as tensors; see `hvd_compress.codecs.Encoded`.

    Attributes:
        payload: uint8 [bytes].
        residual: float32 [n]; empty where the codec has none.
        finite: bool.
        selected: int64; -1 where the codec does not choose.
        residual_sq: float64, the residual's squared L2 norm.
    """

    payload: tf.Tensor
    residual: tf.Tensor
    finite: tf.Tensor
    selected: tf.Tensor
    residual_sq: tf.Tensor


def encode(codec: Codec, grad: tf.Tensor, residual: tf.Tensor | None, counter: tf.Tensor) -> Encoded:
    """Encodes one segment.

    Args:
        codec: Its options are baked into the graph.
        grad: Any shape, n elements of one of `DTYPES`.
        residual: float32 [n]; None where the codec has none.
        counter: int64 [4]: seed, rank, step, segment.
    """
    if residual is None:
        residual = tf.zeros([0], tf.float32)
    return Encoded(*_library().hvd_compress_encode(grad=grad, residual=residual, counter=counter, **_attributes(codec)))


def decode(codec: Codec, payloads: tf.Tensor, sizes: tf.Tensor, weight: tf.Tensor, elements: tf.Tensor) -> tf.Tensor:
    """Adds up ``weight * decoded`` of several payloads of one segment, in their order.

    Args:
        codec: What encoded them.
        payloads: uint8, one behind the other.
        sizes: int64, the length of each in bytes; one of length 0 adds nothing.
        weight: float32.
        elements: int64, n.

    Returns:
        float32 [n].

    Raises:
        tf.errors.InvalidArgumentError: A payload is not one that `encode` wrote for n elements.
    """
    return _library().hvd_compress_decode(
        payloads=payloads, sizes=sizes, weight=weight, elements=elements, **_attributes(codec)
    )


def _attributes(codec: Codec) -> dict[str, Any]:
    options = codec.kernel_options()
    if "coding" in options:
        options["coding"] = int(options["coding"])
    return {"kind": int(codec.kernel_kind()), **options}


@functools.cache
def _library() -> Any:
    path = Path(__file__).with_name("_ops" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        raise ImportError(
            "hvd_compress was installed without its TensorFlow ops, as TensorFlow was not there then: install it again "
            "(pip install --force-reinstall --no-deps hvd_compress) in an environment that has TensorFlow"
        )
    try:
        library = tf.load_op_library(str(path))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"hvd_compress's TensorFlow ops were built for another TensorFlow than {tf.__version__}: install hvd_compress "
            f"again ({error.message})"
        ) from error
    tf.no_gradient("HvdCompressEncode")
    tf.no_gradient("HvdCompressDecode")
    return library
