"""Gradient compression for `horovod.tensorflow` and `horovod.tensorflow.keras`."""

try:
    import horovod.tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        "hvd_compress.tensorflow needs TensorFlow, and Horovod built against it (HOROVOD_WITH_TENSORFLOW=1); importing "
        f"horovod.tensorflow failed: {error}"
    ) from error

from hvd_compress.plan import MismatchError
from hvd_compress.tensorflow.compression import Compression
from hvd_compress.tensorflow.compressor import CodecCompressor

__all__ = ["CodecCompressor", "Compression", "MismatchError"]
