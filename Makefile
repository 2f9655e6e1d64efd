# The two commands of the README are `make run` and `make test`; both create .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-generic test-gpu bench report lint docs docs-check package clean

run: $(VENV)/.run
	$(BIN)/backnorm demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

# The kernels on a CPU without any vector extension; their compiled code is kept apart.
test-generic: $(VENV)/.dev
	NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=build/generic $(BIN)/python -m pytest -n auto tests/test_cpu.py tests/test_numbers.py

# On a machine with a GPU, with the Python that has torch and Triton there.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/test_gpu.py tests/test_runtime_cuda.py

bench: $(VENV)/.dev
	$(BIN)/backnorm bench --device cpu --against torch -o benchmarks/results/cpu.jsonl

report: $(VENV)/.dev
	$(BIN)/backnorm report benchmarks/results/cpu.jsonl benchmarks/results/h200.jsonl -o docs/figures

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/python -m backnorm.document docs/operators.md

docs-check: $(VENV)/.dev
	$(BIN)/python -m backnorm.document --check docs/operators.md

# Builds the sdist and the wheel, and runs the demo from the wheel in a venv that has nothing else.
package: $(VENV)/.dev
	rm -rf dist build/package
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/package
	build/package/bin/python -m pip install --quiet dist/*.whl
	cd build && package/bin/backnorm demo

$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "backnorm needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.venv pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
