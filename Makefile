# Short names for what the scripts do; each makes the environment where it is missing.
#     make install      the environment alone, in .venv      make check    style, format, types, house rules
#     make quickstart   all three steps on a small task      make fix      mends style and format where it can
#     make docs         the site, in build/site              make test     all that, and every test
#     make release      wheel and sdist, in dist/            make unit     the quick tests alone
#     make container    an image for this machine            make long     the long form of the tests: hours

.PHONY: install quickstart docs release container check fix test unit long

install:
	bash -c 'source scripts/_setup.sh && echo "the environment: source $$(dirname "$$PYTHON")/activate"'

quickstart:
	bash scripts/quickstart.sh

docs:
	bash scripts/docs.sh

release:
	bash scripts/build_release.sh

# DEVICE=cpu or cuda; BUILDER=docker or podman
DEVICE ?= $(shell command -v nvidia-smi >/dev/null && echo cuda || echo cpu)
BUILDER ?= $(shell command -v podman || echo docker)
container:
	$(BUILDER) build --file Containerfile --build-arg DEVICE=$(DEVICE) --tag threestep:$(DEVICE) .

check:
	bash scripts/check.sh

fix:
	THREESTEP_EXTRA=test bash -c 'source scripts/_setup.sh && "$$PYTHON" -m ruff check --fix . && "$$PYTHON" -m ruff format .'

test:
	bash scripts/test.sh

unit:
	bash scripts/test.sh -m unit

long:
	bash scripts/test.sh --long
