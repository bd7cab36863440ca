# Short names for what the scripts do; each makes the environment where it is missing.
#     make check    style, format, types, house rules       make test     all that, and every test
#     make fix      mends style and format where it can     make unit     the quick tests alone
#     make api      docs/api/index.html, from the docstrings

.PHONY: check fix test unit api

check:
	bash scripts/check.sh

fix:
	bash -c 'source scripts/_setup.sh && "$$PYTHON" -m ruff check --fix . && "$$PYTHON" -m ruff format .'

test:
	bash scripts/test.sh

unit:
	bash scripts/test.sh -m unit

api:
	bash -c 'source scripts/_setup.sh && "$$PYTHON" -W ignore -m pdoc --output-directory docs/api training'
