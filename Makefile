# `make train` and `make test` do all of their own set-up; `make clean` undoes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KERNELS := hatch_build.py src/demopt/kernels/cpu.c
INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: train test check wheel clean

train: $(VENV)/.train
	$(BIN)/demopt train --workers 2 --out runs/first --overwrite

test: $(VENV)/.test check
	$(BIN)/pytest --numprocesses auto
	$(BIN)/pytest --numprocesses auto --without-kernels tests/optim tests/local tests/golden tests/wire

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(VENV)/.test
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train,tensorboard,test]'
	touch $@ $(VENV)/.train

clean:
	rm -rf $(VENV) src/demopt/kernels/cpu.so.1 dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A million mutated frames: each is refused, or decodes to something that makes sense.
.PHONY: fuzz
fuzz: $(VENV)/.test
	$(BIN)/python benchmarks/fuzz_frames.py
