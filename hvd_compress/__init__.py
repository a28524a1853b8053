"""Gradient compression for stock Horovod: `hvd_compress.torch` has the object to pass as ``compression=``."""

from hvd_compress._kernels import PayloadError
from hvd_compress._version import __version__

__all__ = ["PayloadError", "__version__"]
