# Two commands matter: `make demo` and `make test`. The rest is for developers.
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 2
DEMO ?= demo
# A free port for each start, so that several can run on one machine.
PORT = $$($(PYTHON) -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
# One thread a rank: ranks that share cores lose more to spinning threads than they gain.
STUDENT = OMP_NUM_THREADS=1 $(BIN)/deepspeed --num_gpus $(RANKS) --master_port $(PORT) \
  --log_level warning launch/student.py

.PHONY: setup demo test bench lint teacher clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@echo "installing 1.6 GB of packages, 2-4 minutes; pip is silent meanwhile"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/teacher-dump --preset tiny --out $(DEMO)/cache
	for norm in pre post; do for curriculum in joint grow; do \
	  $(STUDENT) --preset tiny --norm $$norm --curriculum $$curriculum \
	    --cache $(DEMO)/cache --out $(DEMO)/runs/$$norm-$$curriculum || exit $$?; \
	done; done
	$(BIN)/student-train report $(DEMO)/runs/* --out $(DEMO)/report

# How launch/tiny_teacher was made: train it without a teacher, compare it, copy it there by hand.
teacher: setup
	$(BIN)/teacher-dump tokenizer --data stdlib --vocab-size 2048 --out build/tokenizer
	$(BIN)/teacher-dump --preset tiny-teacher --tokenizer build/tokenizer --out build/tokens
	$(STUDENT) --preset tiny-teacher --cache build/tokens --out build/teacher-run
	$(BIN)/student-train export build/teacher-run --out build/tiny_teacher --dtype bfloat16
	$(BIN)/student-train baseline build/tokens --export build/tiny_teacher

test: setup
	$(BIN)/pytest -q

# LOGITS=FILE.npz measures your own teacher's logits; tests/bench_cache.py says how they lie there.
bench: setup
	$(BIN)/python tests/bench_cache.py $(if $(LOGITS),--logits $(LOGITS))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(DEMO) build
