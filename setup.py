"""Builds the kernels; everything else stands in setup.cfg."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Says in a sentence what is missing where there is no compiler."""

    def build_extensions(self):
        """Checks for the compiler, then builds."""
        compiler = shlex.split(os.environ.get("CXX", "")) or getattr(self.compiler, "compiler_cxx", None) or ["g++"]
        if shutil.which(compiler[0]) is None:
            raise SystemExit(
                f"hvd_compress needs a C++17 compiler to build its kernels, and there is no {compiler[0]!r} on the PATH: "
                "install g++ 9 or newer (Debian: apt-get install g++), or name yours in the environment variable CXX."
            )
        super().build_extensions()


def tensorflow_flags():
    """TensorFlow's version (major_minor), compile and link flags; None where it is not installed.

    Asked of an interpreter outside of pip's build environment, which hides what is installed.
    """
    code = (
        "import json, tensorflow as tf; s = tf.sysconfig; version = '_'.join(tf.__version__.split('.')[:2]); "
        "print(json.dumps([version, s.get_compile_flags(), s.get_link_flags()]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else None


ParallelCompile("MAX_JOBS").install()

# No -ffast-math: every version of a kernel, on every machine, must give the same bits.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
KERNELS = sorted(
    set(glob("hvd_compress/csrc/*.cc")) - set(glob("hvd_compress/csrc/*bindings.cc") + glob("hvd_compress/csrc/tf_*.cc"))
)
HEADERS = sorted(glob("hvd_compress/csrc/*.h"))

extensions = [
    Pybind11Extension(
        "hvd_compress._kernels",
        [*KERNELS, "hvd_compress/csrc/bindings.cc"],
        depends=HEADERS,
        cxx_std=17,
        extra_compile_args=FLAGS,
    )
]
flags = tensorflow_flags()
if flags is not None:
    extensions.append(
        Extension(
            f"hvd_compress.tensorflow._ops_{flags[0]}",  # two environments may share an editable install
            # The codecs it is handed at run time.
            ["hvd_compress/csrc/message.cc", "hvd_compress/csrc/scatter.cc", *sorted(glob("hvd_compress/csrc/tf_*.cc"))],
            depends=HEADERS,
            extra_compile_args=["-std=c++17", "-fvisibility=hidden", *FLAGS, *flags[1]],
            extra_link_args=flags[2],
            optional=True,  # where it can't be built, PyTorch's users do not need it; whoever does is told
        )
    )

setup(ext_modules=extensions, cmdclass={"build_ext": BuildKernels})
