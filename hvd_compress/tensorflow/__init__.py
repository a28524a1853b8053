"""Gradient compression for `horovod.tensorflow` and `horovod.tensorflow.keras`."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hvd_compress.tensorflow.apmsqueeze import APMSqueeze
    from hvd_compress.tensorflow.tensorboard import TensorBoardStats

__all__ = ["APMSqueeze", "CodecCompressor", "Compression", "MismatchError", "TensorBoardStats"]


def __getattr__(name: str) -> Any:
    """Imports what needs a Keras when it is asked for: nothing else here does."""
    if name == "APMSqueeze":
        from hvd_compress.tensorflow.apmsqueeze import APMSqueeze

        return APMSqueeze
    if name == "TensorBoardStats":
        from hvd_compress.tensorflow.tensorboard import TensorBoardStats

        return TensorBoardStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
