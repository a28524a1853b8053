#!/usr/bin/env bash
# Installs the Debian packages that building and running Horovod takes, where they are missing: as root, with apt-get;
# otherwise it says which they are and fails.
#
#   docker/install_debian_packages.sh [PYTHON]     PYTHON: the interpreter that will be used (default: python3)
set -euo pipefail

python=${1:-python3}
missing=()
command -v "$python" >/dev/null || missing+=(python3)
# Asked of the interpreter, not of dpkg: a Python that is not Debian's brings both itself.
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || missing+=(python3-dev)
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
command -v mpicxx >/dev/null || missing+=(libopenmpi-dev)
command -v ssh >/dev/null || missing+=(openssh-client)

[[ ${#missing[@]} -eq 0 ]] && exit 0
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "missing: ${missing[*]} (Debian's names); install them, as root: apt-get install ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
