"""The custom ops, over the same kernels as everywhere: see csrc/tf_ops.cc."""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_compress import _kernels

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
"""The dtypes that a gradient can have to be compressed."""

_OPS = ("Encode", "Pack", "Scatter", "Reduce", "Unpack", "Decode", "Arrive", "Finish")


@functools.cache
def library() -> Any:
    """The module of the ops: hvd_compress_encode and so on.

    Raises:
        ImportError: The ops were not built, or for another TensorFlow; the text says what to do.
    """
    version = "_".join(tf.__version__.split(".")[:2])
    path = Path(__file__).with_name(f"_ops_{version}{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        raise ImportError(
            f"hvd_compress was installed without its ops for TensorFlow {tf.__version__}, as that was not there then: "
            "install it again (pip install --force-reinstall --no-deps hvd_compress) in an environment that has it"
        )
    try:
        library = tf.load_op_library(str(path))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"hvd_compress's TensorFlow ops were built for another TensorFlow than {tf.__version__}: install hvd_compress "
            f"again ({error.message})"
        ) from error
    connect = ctypes.CDLL(str(path)).hvd_compress_connect
    connect.argtypes, connect.restype = [ctypes.c_void_p], ctypes.c_int64
    if connect(_kernels.FIND_SESSION) != _kernels.SESSION_VERSION:
        raise ImportError("hvd_compress's TensorFlow ops and its kernels are of different versions: install hvd_compress again")
    for op in _OPS:
        tf.no_gradient(f"HvdCompress{op}")
    return library
