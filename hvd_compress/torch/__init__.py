"""Gradient compression for `horovod.torch`."""

try:
    import horovod.torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "hvd_compress.torch needs PyTorch, and Horovod built against it (HOROVOD_WITH_PYTORCH=1); importing horovod.torch "
        f"failed: {error}"
    ) from error

from hvd_compress.plan import MismatchError
from hvd_compress.torch.apmsqueeze import APMSqueeze
from hvd_compress.torch.compression import Compression
from hvd_compress.torch.compressor import CodecCompressor
from hvd_compress.torch.tensorboard import TensorBoardStats

__all__ = ["APMSqueeze", "CodecCompressor", "Compression", "MismatchError", "TensorBoardStats"]
