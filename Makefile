# `make train` and `make test` do all of their own set-up; `make clean` undoes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FRAMEWORKS ?= .venv-integrations
KERNELS := hatch_build.py $(wildcard src/demopt/kernels/*.[ch])
INSTALL = $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: train test test-integrations check wheel compat nightly notebook mutants clean

train: $(VENV)/.train
	@echo "800 steps on two cores take five to ten minutes; the validation loss ends near 1.24 nats per byte."
	$(BIN)/demopt train --workers 2 --device cpu --out runs/first --overwrite

test: $(VENV)/.test $(VENV)/azurite/.installed check
	$(BIN)/pytest --numprocesses auto --dist worksteal --durations 10

# Lightning, torchtitan and Ray, with their dependencies, in an environment that also sees all of VENV, such as torch.
test-integrations: $(FRAMEWORKS)/.test
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python budget.py

# A wheel with compiled kernels for any Linux with the glibc in its name, and the source distribution, in dist/.
wheel: $(VENV)/.test
	rm -rf build dist
	$(BIN)/python -m hatchling build --directory build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/demopt-*-linux_*.whl
	mv build/demopt-*.tar.gz dist

# A part of the suite with other versions of Python and torch, in fresh environments (noxfile.py).
compat: $(VENV)/bin/pip
	$(BIN)/pip install --quiet nox
	$(BIN)/nox

# The tests that take long, then the others with more examples by hypothesis.
nightly: $(VENV)/.test $(VENV)/azurite/.installed
	$(BIN)/pytest -m nightly
	$(BIN)/pytest --numprocesses auto --dist worksteal --hypothesis-profile=nightly

# The notebook in a fresh environment, as a reader has it; its first cell installs demopt.
notebook:
	rm -rf .venv-notebook
	$(PYTHON) -m venv .venv-notebook
	.venv-notebook/bin/pip install --quiet ipykernel nbconvert
	.venv-notebook/bin/jupyter nbconvert --to notebook --execute --output-dir runs notebooks/first_run.ipynb

# Which changes of the core does no test notice? Takes hours; `.venv/bin/mutmut results` lists them.
mutants: $(VENV)/.test
	$(BIN)/pip install --quiet mutmut
	$(BIN)/mutmut run

include laboratory/Makefile

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/bin/pip pyproject.toml constraints.txt $(KERNELS)
	$(INSTALL) --editable '.[train,tensorboard,test]'
	touch $@ $(VENV)/.train

# An Azure server for tests/runs, if npm is installed; otherwise they skip its tests.
$(VENV)/azurite/.installed: $(VENV)/bin/pip
	mkdir -p $(@D)
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(@D) azurite@3.37.0; fi
	touch $@

# The documentation site, offline: site/index.html. A warning fails the build; with --quiet, mkdocs would count none.
.PHONY: docs
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

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
	rm -rf site mutants .nox .venv-notebook $(VENV) $(FRAMEWORKS) src/demopt/kernels/cpu.so.1 dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
