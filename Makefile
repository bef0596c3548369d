# make demo   a real hyperparameter study, its trials side by side
# make test   all tests (make test-full: with the long random runs)
# make check  format, lint, types, architecture rules and tests, as before a commit on main

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

# Not from their own requirements: torchvision and timm would bring another torch.
UNBOUND := torchvision==0.28.0 timm==1.0.31 torchaudio==2.11.0

CPP := $(wildcard waterflow/*/csrc/*.cpp waterflow/*/csrc/*.h)

.PHONY: demo test test-full check format lint types build clean

demo: $(VENV)/.built
	$(BIN)/waterflow demo --compare --out demo-output

test: $(VENV)/.built
	$(BIN)/python -m pytest

test-full: $(VENV)/.built
	$(BIN)/python -m pytest --full

check: lint types test

lint: $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

types: $(VENV)/.built
	$(BIN)/mypy

format: $(VENV)/.built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix -q .
	$(BIN)/clang-format -i $(CPP)

build: $(VENV)/.built

$(VENV)/.ready: constraints-cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-cpu.txt torch numpy setuptools wheel ninja
	$(PIP) install --no-deps $(UNBOUND)
	$(PIP) install -c constraints-cpu.txt $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*(d for e in (p['dependencies'], *p['optional-dependencies'].values()) for d in e))")
	touch $@

$(VENV)/.built: $(VENV)/.ready $(CPP) setup.py
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info waterflow/*.so
