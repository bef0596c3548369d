# make demo   a real hyperparameter study, its trials side by side
# make test   the short tier, some ten minutes on two slow cores: what every change must pass
# make test-changed  the tests that the files which differ from main's last commit concern (BASE=COMMIT: from that commit)
# make test-all      all tests; make test-full: with the long random runs
# make tiers  which tests of the short tier need time, and why
# make weight  the package's lines of code by folder, and their budget
# make check  format, lint, types and make test, as before a commit on main
# make cuda-check  the CUDA code on a stand-in for a GPU, some minutes (CUDA_CHECK=all: in all orders of streams)
# make gpu-bundle  what a machine with a GPU needs beside the clone, in one folder; docs/gpu.md says how to run it
# make sanitize  the allocator's random runs under the address, undefined behaviour and thread sanitizers

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

# Packages are installed without bytecode. Tests start hundreds of processes, which keep it, whatever the shell says: else
# each of them compiles the packages' files anew.
export PYTHONDONTWRITEBYTECODE :=

# Torch for CUDA, whose steps are checked without a GPU, on a stand-in.
CUDA_VENV   := .venv-cuda
CUDA_PYTHON ?= python3.12

# Not from their own requirements: torchvision and timm would bring another torch. Two of them are built for CUDA, and
# .ci/cpu_wheels.py makes their Python code import beside a torch without it.
UNBOUND := torchvision==0.28.0 timm==1.0.31 torchaudio==2.11.0

CPP := $(wildcard $(addprefix waterflow/*/csrc/,*.cpp *.h */*.cpp */*.h) tests/native/*.cpp tests/native/*.h tests/*/native/*.cpp)

# The allocator's core knows no torch: it compiles alone.
CORE := $(addprefix waterflow/allocator/csrc/,simulated/simulated_device.cpp cpu/cpu_device.cpp stream/stream_clocks.cpp \
  stream/free_sets.cpp stream/stream_allocator.cpp)
FUZZ_ROWS := 6000

# Two processes: the suite is written for two cores. Tests of one file stay together as far as that fills both.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-changed test-all test-full tiers weight check format lint types build sanitize cuda-env gpu-bundle cuda-check clean

demo: $(VENV)/.built
	$(BIN)/python -m examples.demo

# The tests have an extension of their own.
$(VENV)/.tests: $(VENV)/.built tests/native/setup.py
	$(BIN)/python -c 'import tests.native'
	touch $@

test: $(VENV)/.tests
	$(PYTEST)

test-changed: $(VENV)/.tests
	files=$$($(BIN)/python -m tests.changed $(BASE)) && $(PYTEST) $$files

test-all: $(VENV)/.tests
	$(PYTEST) --all

test-full: $(VENV)/.tests
	$(PYTEST) --full

tiers: $(VENV)/.tests
	$(BIN)/python -m pytest --tiers

weight:
	$(PYTHON) -m tests.weight

check: lint types test

lint: $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP) tests/gpu/standin/*.cpp
	$(BIN)/python -m tests.docstrings

types: $(VENV)/.built
	$(BIN)/mypy

sanitize: build/fuzz-address,undefined build/fuzz-thread
	build/fuzz-address,undefined $(FUZZ_ROWS)
	build/fuzz-thread $(FUZZ_ROWS)

build/fuzz-%: $(CORE) $(wildcard waterflow/allocator/csrc/*.h waterflow/allocator/csrc/*/*.h tests/native/*.h) tests/native/fuzz.cpp tests/native/fuzz_table.cpp tests/allocator/native/fuzz_main.cpp
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -DWATERFLOW_TEST_HOOKS -Wall -Wextra -fsanitize=$* -fno-sanitize-recover=all -fno-omit-frame-pointer -pthread -I. \
	  $(filter %.cpp,$^) -o $@

format: $(VENV)/.built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix -q .
	$(BIN)/clang-format -i $(CPP) tests/gpu/standin/*.cpp

build: $(VENV)/.built

# The extension compiles while the other packages are installed.
$(VENV)/.built: $(VENV)/.torch $(CPP) setup.py waterflow/sources.py pyproject.toml .ci/cpu_wheels.py
	$(MAKE) --no-print-directory -j2 $(VENV)/.packages $(VENV)/.extension
	touch $@

$(VENV)/.torch: constraints-cpu.txt
	@echo "Installing the packages into .venv and building the C++ extension: about three minutes on two cores, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-cpu.txt torch numpy setuptools wheel ninja
	touch $@

$(VENV)/.packages: pyproject.toml .ci/cpu_wheels.py
	$(PIP) install --no-compile --no-deps $(UNBOUND)
	$(BIN)/python .ci/cpu_wheels.py
	$(PIP) install --no-compile -c constraints-cpu.txt $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*(d for e in (p['dependencies'], *p['optional-dependencies'].values()) for d in e))")
	touch $@

$(VENV)/.extension: $(CPP) setup.py waterflow/sources.py
	WATERFLOW_TEST_HOOKS=1 $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# An environment of its own with torch for CUDA, some 5 GB; no GPU is needed.
cuda-env: $(CUDA_VENV)/.built

$(CUDA_VENV)/.packages: constraints-cpu.txt pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(CUDA_PYTHON) -m venv $(CUDA_VENV)
	grep -v '^torch==' constraints-cpu.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-compile -c $(CUDA_VENV)/constraints.txt \
	  torch==2.11.0 setuptools wheel ninja $$($(CUDA_PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['test'], *p['optional-dependencies']['metrics'])")
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check -q install --no-compile --no-deps $(UNBOUND)
	$(CUDA_VENV)/bin/python .ci/cpu_wheels.py
	touch $@

$(CUDA_VENV)/.built: $(CUDA_VENV)/.packages $(CPP) setup.py waterflow/sources.py
	WATERFLOW_TEST_HOOKS=1 $(CUDA_VENV)/bin/python setup.py -q build_ext --inplace
	touch $@

# What a machine with a GPU and without a network may lack; never torch or numpy.
GPU_WHEELS := pytest pluggy iniconfig pygments pytest-timeout hypothesis sortedcontainers optuna alembic mako markupsafe \
  sqlalchemy greenlet colorlog tqdm PyYAML cloudpickle
GPU_BUNDLE := build/gpu-bundle

gpu-bundle: $(CUDA_VENV)/.built
	rm -rf $(GPU_BUNDLE)
	mkdir -p $(GPU_BUNDLE)/wheels
	cp benchmarks/gpu_run.sh $(GPU_BUNDLE)/run.sh
	extension=_C$$($(CUDA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))') && \
	  strip -o $(GPU_BUNDLE)/$$extension waterflow/$$extension
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check -q download --only-binary :all: --no-deps -d $(GPU_BUNDLE)/wheels \
	  -c $(CUDA_VENV)/constraints.txt $(GPU_WHEELS)
	du -sh $(GPU_BUNDLE)

cuda-check: $(CUDA_VENV)/.built
	$(CUDA_VENV)/bin/python -m tests.gpu.standin $(CUDA_CHECK)

clean:
	rm -rf $(VENV) $(CUDA_VENV) build *.egg-info waterflow/*.so
