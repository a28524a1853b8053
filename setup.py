"""Builds the kernels; everything else stands in setup.cfg."""

import os
import shlex
import shutil
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
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


ParallelCompile("MAX_JOBS").install()

# No -ffast-math: every version of a kernel, on every machine, must give the same bits.
kernels = Pybind11Extension(
    "hvd_compress._kernels",
    sorted(glob("hvd_compress/csrc/*.cc")),
    depends=sorted(glob("hvd_compress/csrc/*.h")),
    cxx_std=17,
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
)

setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
