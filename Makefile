# `make train` and `make test` do all of their own set-up; `make clean` undoes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FRAMEWORKS ?= .venv-integrations
KERNELS := hatch_build.py src/demopt/kernels/cpu.c
INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: train test test-integrations check wheel compat clean

train: $(VENV)/.train
	$(BIN)/demopt train --workers 2 --out runs/first --overwrite

test: $(VENV)/.test check
	$(BIN)/pytest --numprocesses auto --dist worksteal
	$(BIN)/pytest --numprocesses auto --dist worksteal --without-kernels tests/optim tests/local tests/golden tests/wire

# Lightning, torchtitan and Ray, with what they need, in an environment that sees all of the other one, torch too.
test-integrations: $(FRAMEWORKS)/.test
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A wheel with compiled kernels for any Linux with the glibc in its name, and the source distribution, in dist/.
wheel: $(VENV)/.test
	rm -rf build dist
	$(BIN)/python -m hatchling build --directory build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/demopt-*-linux_*.whl
	mv build/demopt-*.tar.gz dist

# A part of the suite in fresh environments, one after the other: PAIRS="3.10:2.6.0 ...", Python and torch.
PAIRS ?=
compat:
	$(PYTHON) benchmarks/versions.py $(PAIRS) --results benchmarks/results/versions.json

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train,tensorboard,test]'
	touch $@ $(VENV)/.train

# The documentation site, offline: site/index.html.
.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(VENV)/.docs: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train,docs]'
	touch $@

SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

$(FRAMEWORKS)/.test: $(VENV)/.test tests/integrations/constraints.txt
	$(BIN)/python -m venv --clear $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE_PACKAGES))')" > \
	    "$$($(FRAMEWORKS)/bin/python $(SITE_PACKAGES))/base.pth"
	$(FRAMEWORKS)/bin/pip install --quiet --no-deps --requirement tests/integrations/constraints.txt
	touch $@

clean:
	rm -rf site $(VENV) $(FRAMEWORKS) src/demopt/kernels/cpu.so.1 dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A million mutated frames: each is refused, or decodes to something that makes sense.
.PHONY: fuzz
fuzz: $(VENV)/.test
	$(BIN)/python benchmarks/fuzz_frames.py --results benchmarks/results/fuzz-frames.json
