# The two commands of the README are `make run` and `make test`; both create .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SANITIZED := bfloat16 and (3-7 or 128-64 or 9-17000 or 2-6-5-3 or 2-12-700 or 2-12-131 or 5-7-49 or 301-3-7 or 41-97-0 or 203-45-0-0-5 or 2-13-225 or 2-5-601 or 3-64-300 or 5-48-900 or 130-64-520 or 3-8-520 or 70-28-2000)

.PHONY: run test test-generic test-avx2 test-gpu sanitize-gpu bench bench-sdk report lint docs docs-check package clean

run: $(VENV)/.run
	$(BIN)/backnorm demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

# The kernels on a CPU without any vector extension; their compiled code is kept apart.
test-generic: $(VENV)/.dev
	NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=build/generic $(BIN)/python -m pytest -n auto tests/test_cpu.py tests/test_batch_norm_views.py \
	  tests/test_numbers.py

# And on one that has AVX2 but not AVX-512, whose code is another in part.
AVX2 := +avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3
test-avx2: $(VENV)/.dev
	NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=$(AVX2) NUMBA_CACHE_DIR=build/avx2 $(BIN)/python -m pytest -n auto \
	  tests/test_cpu.py tests/test_batch_norm_views.py

# On a machine with a GPU, with the Python that has torch and Triton there.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/test_gpu.py tests/test_runtime_cuda.py tests/test_torch_cuda.py

# The same machine: a small set of the kernels under NVIDIA's checkers of memory accesses and of races.
sanitize-gpu:
	for tool in memcheck racecheck; do \
	  PYTHONPATH=src compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	    $(PYTHON) -m pytest -q -p no:cacheprovider tests/test_gpu.py -k "$(SANITIZED)" || exit 1; \
	done

bench: $(VENV)/.dev
	$(BIN)/backnorm bench --device cpu --against torch -o benchmarks/results/cpu.jsonl

# A C program's first call in milliseconds, and both phases and the synchronize of later ones in microseconds.
bench-sdk: $(VENV)/.dev
	mkdir -p build
	HOME_DIR=$$($(BIN)/backnorm sdk) && cc -O2 tests/c/latency.c -o build/latency -I$$HOME_DIR/include \
	  -L$$HOME_DIR/lib64 -Wl,-rpath,$$HOME_DIR/lib64 -lascendcl -lnnopbase -lopapi_nn
	for size in "4 64" "4 64" "512 768"; do echo "$$size:" $$(build/latency $$size 2000); done

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
