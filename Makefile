PYTHON ?= python3
BIN := .venv/bin
# torch 2.13.0's CUDA wheel requires exactly triton 3.7.1
TORCH ?= torch==2.13.0 triton==3.7.1

report: .venv/base
	$(BIN)/kvfold plan --model qwen3-8b --weights w4a16 --gpu rtx-4090 --trace traces/data/sample.jsonl --slo agent --formats bf16,gaac --seeds 5 --report plan.html

test: .venv/test
	$(BIN)/python -m pytest $(ARGS)

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/test: .venv/base
	$(BIN)/python -m pip install --quiet $(TORCH) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

.PHONY: report test check clean
