"""Building the kernels."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_compiler_the_build_says_so(tmp_path):
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    result = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "needs a C++17 compiler to build its kernels, and there is no 'no-such-compiler' on the PATH" in result.stderr
