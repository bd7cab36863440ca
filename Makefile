# Short names for what the scripts do; each makes the environment where it is missing.
#     make check    style, format, types, house rules       make test     all that, and every test
#     make fix      mends style and format where it can     make unit     the quick tests alone

.PHONY: check fix test unit

check:
	bash scripts/check.sh

fix:
	bash -c 'source scripts/_setup.sh && "$$PYTHON" -m ruff check --fix . && "$$PYTHON" -m ruff format .'

test:
	bash scripts/test.sh

unit:
	bash scripts/test.sh -m unit
