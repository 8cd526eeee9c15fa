# Every target does its own set-up: on a fresh machine `make demo` or `make test` is all there is to type.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DIST := build/dist
BENCHMARK := --benchmark-enable --benchmark-only --benchmark-columns=median,iqr,rounds

VERSIONS ?= 2.11.0

.PHONY: setup demo test test-long test-versions soak lint types perf perf-gpu plots numerics wheel clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m mhar_compile.demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not long" --durations 10

test-long: setup
	$(BIN)/python -m pytest -m long

# With other versions of torch, each in an environment of its own; from PyPI it brings 5 GB of CUDA libraries with it.
test-versions: $(VERSIONS:%=build/versions/%/.installed)
	for version in $(VERSIONS); do \
		build/versions/$$version/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not long" $(TESTS) || exit 1; \
	done

build/versions/%/.installed: pyproject.toml
	$(PYTHON) -m venv build/versions/$*
	build/versions/$*/bin/python -m pip install --quiet torch==$* pytest-benchmark --editable '.[test]'
	touch $@

# Trains in two processes for 300 steps, kills one, resumes, and compares.
soak: setup
	$(BIN)/python -m pytest tests/test_soak.py -m long

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy sees the package as it is installed, with ops/ and lowering/ inside.
types: setup
	rm -rf build/types
	mkdir -p build/types
	cp -r mhar_compile build/types/mhar_compile
	cp -r ops lowering build/types/mhar_compile/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p mhar_compile

# First what can be counted, on all cores, then what must be timed, alone.
perf: setup
	mkdir -p build/perf
	$(BIN)/python -m perf.gate
	$(BIN)/python -m pytest perf $(BENCHMARK) --benchmark-json=build/perf/cpu.json
	$(BIN)/python -m perf.compare perf/baseline/cpu.json build/perf/cpu.json --same-device

# Needs a GPU: correctness and times of the kernels, then the benchmarks of `make perf`.
perf-gpu: setup
	$(BIN)/python -m perf.gpu
	$(BIN)/python -m pytest perf $(BENCHMARK) --benchmark-json=perf/results/gpu-benchmarks.json

# Measures on this machine what the plots show, and draws them from the stored results.
plots: setup
	$(BIN)/python -m perf.sweep
	$(BIN)/python -m perf.plots

numerics: setup
	$(BIN)/python -m perf.numerics

# The wheel is installed alone into a folder of its own and used from there.
wheel: setup
	rm -rf $(DIST) build/installed
	$(BIN)/python -m build --wheel --outdir $(DIST)
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed $(DIST)/*.whl
	cd build/installed && PYTHONPATH=. ../../$(BIN)/python ../../tests/smoke.py

clean:
	rm -rf build runs .pytest_cache .hypothesis .mypy_cache .ruff_cache .benchmarks
