#!/usr/bin/env bash
# Builds Horovod against the torch and TensorFlow that a Python environment has, and installs it there.
#
#   docker/install_horovod.sh [PYTHON]     PYTHON: the environment's interpreter (default: python3)
#
# The wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/hvd_compress, keyed by every version that it was built against, so
# only the first call builds (4 to 8 minutes on two cores). HOROVOD_* variables (HOROVOD_GPU_OPERATIONS=NCCL,
# HOROVOD_WITHOUT_MPI=1, ...) reach Horovod's build as they are and are part of the key.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
python=$(command -v "${1:-python3}") || { echo "install_horovod.sh: no such interpreter: ${1:-python3}" >&2; exit 1; }

# Of whatever package has the module: there is also tensorflow-cpu, tf-nightly and others.
version_of() { "$python" -c "import importlib.metadata as m; print(m.version(m.packages_distributions()['$1'][0]))" 2>/dev/null; }
torch=$(version_of torch || echo none)
tensorflow=$(version_of tensorflow || echo none)
if [[ $torch$tensorflow == nonenone ]]; then
  echo "install_horovod.sh: $python has neither torch nor tensorflow; Horovod is built against them, install one first" >&2
  exit 1
fi

# What is not decided by the caller is: the frameworks that are there, MPI where its compiler is, and Gloo.
[[ $torch == none ]] && export HOROVOD_WITHOUT_PYTORCH=1 || export HOROVOD_WITH_PYTORCH=1
[[ $tensorflow == none ]] && export HOROVOD_WITHOUT_TENSORFLOW=1 || export HOROVOD_WITH_TENSORFLOW=1
export HOROVOD_WITHOUT_MXNET=1
if [[ -z ${HOROVOD_WITHOUT_MPI:-} ]]; then
  command -v mpicxx >/dev/null || {
    echo "install_horovod.sh: no mpicxx: install Open MPI (Debian: openmpi-bin libopenmpi-dev), or set HOROVOD_WITHOUT_MPI=1" >&2
    exit 1
  }
  export HOROVOD_WITH_MPI=1
fi
[[ -n ${HOROVOD_WITHOUT_GLOO:-} ]] || export HOROVOD_WITH_GLOO=1

key=$({
  echo "horovod $version torch $torch tensorflow $tensorflow"
  "$python" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_platform())'
  [[ -n ${HOROVOD_WITHOUT_MPI:-} ]] || mpicxx -show
  ${CXX:-g++} -dumpfullversion
  env | grep '^HOROVOD_' | LC_ALL=C sort
  sha256sum <"$0"
} | sha256sum | cut -c1-12)
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_compress/horovod-$version-torch-$torch-tensorflow-$tensorflow-$key

if ! compgen -G "$wheels/horovod-*.whl" >/dev/null; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # The tools of the build stay out of the environment: Horovod's setup needs an old setuptools and an old CMake.
  "$python" -m pip install --quiet --target "$work/tools" 'setuptools<81' wheel 'cmake<4' packaging cffi
  export PYTHONPATH=$work/tools${PYTHONPATH:+:$PYTHONPATH} PATH=$work/tools/bin:$PATH

  echo "horovod==$version --hash=sha256:$sha256" >"$work/requirement.txt"
  "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --require-hashes \
    -r "$work/requirement.txt" -d "$work"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  source=$work/horovod-$version
  # torch >= 2.1 has C++17 headers, torch >= 2.14 C++20 ones.
  case $torch in
    none | 1.* | 2.[0-9].* | 2.1[0-3].*) standard=17 ;;
    *) standard=20 ;;
  esac
  sed -i "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $standard)/" "$source"/{,horovod/torch/}CMakeLists.txt
  # TensorFlow >= 2.16 no longer ships all the XLA headers; only the XLA-compiled GPU collectives need them.
  case $tensorflow in
    none | [01].* | 2.[0-9].* | 2.1[0-5].*) ;;
    *) sed -i '/xla_mpi_ops\.cc/d' "$source/horovod/tensorflow/CMakeLists.txt" ;;
  esac

  echo "building Horovod $version against torch $torch and tensorflow $tensorflow (4 to 8 minutes on two cores)"
  if ! "$python" -m pip wheel --no-build-isolation --no-deps -w "$work/wheel" "$source" >"$work/log" 2>&1; then
    tail -n 60 "$work/log" >&2
    echo "install_horovod.sh: the build failed; its last 60 lines are above" >&2
    exit 1
  fi
  mkdir -p "$(dirname "$wheels")"
  rm -rf "$wheels"
  mv "$work/wheel" "$wheels"
  unset PYTHONPATH
fi
"$python" -m pip install --quiet --force-reinstall --no-deps "$wheels"/horovod-*.whl
"$python" -m pip install --quiet cloudpickle psutil pyyaml packaging cffi setuptools  # horovodrun imports distutils
