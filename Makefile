# make demo   a real hyperparameter study, its trials side by side
# make test   all tests (make test-full: with the long random runs)
# make sanitize  the allocator's random runs under the address, undefined behaviour and thread sanitizers
# make check  format, lint, types, architecture rules and tests, as before a commit on main

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

# Not from their own requirements: torchvision and timm would bring another torch. Two of them are built for CUDA, and
# .ci/cpu_wheels.py makes their Python code import beside a torch without it.
UNBOUND := torchvision==0.28.0 timm==1.0.31 torchaudio==2.11.0

CPP := $(wildcard waterflow/*/csrc/*.cpp waterflow/*/csrc/*.h tests/*/native/*.cpp)

# The allocator's core knows no torch: it compiles alone.
CORE := $(addprefix waterflow/allocator/csrc/,simulated_device.cpp cpu_device.cpp size_bins.cpp stream_clocks.cpp \
  free_sets.cpp stream_allocator.cpp stream_allocator_tiers.cpp stream_allocator_report.cpp request_log.cpp \
  fuzz.cpp fuzz_table.cpp)
FUZZ_ROWS := 6000

.PHONY: demo test test-full check format lint types build sanitize clean

demo: $(VENV)/.built
	$(BIN)/waterflow demo --compare --out demo-output

test: $(VENV)/.built
	$(BIN)/python -m pytest

test-full: $(VENV)/.built
	$(BIN)/python -m pytest --full

check: lint types test sanitize

lint: $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

types: $(VENV)/.built
	$(BIN)/mypy

sanitize: build/fuzz-address,undefined build/fuzz-thread
	build/fuzz-address,undefined $(FUZZ_ROWS)
	build/fuzz-thread $(FUZZ_ROWS)

build/fuzz-%: $(CORE) $(wildcard waterflow/allocator/csrc/*.h) tests/allocator/native/fuzz_main.cpp
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -fsanitize=$* -fno-sanitize-recover=all -fno-omit-frame-pointer -pthread \
	  $(filter %.cpp,$^) -o $@

format: $(VENV)/.built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix -q .
	$(BIN)/clang-format -i $(CPP)

build: $(VENV)/.built

$(VENV)/.ready: constraints-cpu.txt pyproject.toml .ci/cpu_wheels.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-cpu.txt torch numpy setuptools wheel ninja
	$(PIP) install --no-deps $(UNBOUND)
	$(BIN)/python .ci/cpu_wheels.py
	$(PIP) install -c constraints-cpu.txt $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*(d for e in (p['dependencies'], *p['optional-dependencies'].values()) for d in e))")
	touch $@

$(VENV)/.built: $(VENV)/.ready $(CPP) setup.py
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info waterflow/*.so
