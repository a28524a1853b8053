# make demo    trains on two ranks with and without compression, prints a table and writes demo.png
# make test    every test
# make test-tf215  the same with TensorFlow 2.15.1, in .venv-tf215
# make lint    ruff, mypy and hadolint
# make image   the container image of docker/Dockerfile.cpu, with Docker or buildah (docker/README.md)
#
# Each sets up .venv first: a few minutes once, while Horovod builds, and seconds afterwards.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The versions that are tried together.
FRAMEWORKS ?= torch==2.13.0 tensorflow-cpu==2.21.* tf_keras==2.21.*

# More ranks than cores: Open MPI must yield while it waits, and each rank computes on one thread.
export OMP_NUM_THREADS := 1
export TF_CPP_MIN_LOG_LEVEL := 3
# Horovod's Keras is the one before Keras 3.
export TF_USE_LEGACY_KERAS := 1
MPI := --mpi --mpi-args="--oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --mca orte_tag_output 0"
HOROVODRUN := $(BIN)/horovodrun
PARALLEL := $(BIN)/python -m pytest -x -q --color=no --capture=sys tests/parallel

# What builds an image: Docker where its engine runs, else buildah.
IMAGE ?= hvd_compress:cpu
BASE ?= debian:bookworm-slim
BUILD ?= $(if $(shell docker info >/dev/null 2>&1 && echo yes),docker build,buildah build --format docker)
BUILD_OPTIONS ?=

.PHONY: demo test test-tf215 lint image setup clean

demo: setup
	$(HOROVODRUN) -np 2 $(MPI) $(BIN)/python examples/pytorch_digits.py --plot demo.png --json demo.json
	$(HOROVODRUN) -np 2 $(MPI) $(BIN)/python examples/tensorflow2_digits.py --beside demo.json

test: setup
	$(BIN)/python -m pytest -q tests/unit
	for framework in pytorch tensorflow2; do \
	  $(HOROVODRUN) -np 2 $(MPI) $(PARALLEL)/$$framework && \
	  $(HOROVODRUN) -np 3 $(MPI) $(PARALLEL)/$$framework && \
	  $(HOROVODRUN) -np 2 --gloo $(PARALLEL)/$$framework -m "gloo" || exit 1; \
	done
	$(HOROVODRUN) -np 4 $(MPI) $(PARALLEL)/pytorch/test_apmsqueeze.py
	$(HOROVODRUN) -np 4 $(MPI) $(PARALLEL)/tensorflow2/test_apmsqueeze.py
	$(HOROVODRUN) -np 2 $(MPI) $(PARALLEL)/training/test_pytorch.py tests/parallel/training/test_papers.py
	$(HOROVODRUN) -np 2 $(MPI) $(PARALLEL)/training/test_tensorflow2.py

test-tf215:
	$(MAKE) test VENV=.venv-tf215 FRAMEWORKS='torch==2.13.0 tensorflow-cpu==2.15.1' TF_USE_LEGACY_KERAS=0

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile.*

image:
	$(BUILD) --build-arg BASE=$(BASE) $(BUILD_OPTIONS) -f docker/Dockerfile.cpu -t $(IMAGE) .

setup: $(VENV)/.installed

$(VENV)/.horovod: Makefile docker/install_horovod.sh docker/install_debian_packages.sh
	docker/install_debian_packages.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(FRAMEWORKS)
	docker/install_horovod.sh $(BIN)/python
	touch $@

$(VENV)/.installed: $(VENV)/.horovod setup.cfg setup.py pyproject.toml $(wildcard hvd_compress/csrc/*)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-tf215 build *.egg-info hvd_compress/*.so hvd_compress/tensorflow/*.so
