"""Imports what the programs of the tests need, in the process that they are forked from (forked_programs.py)."""

from __future__ import annotations

import gc
from contextlib import suppress

from tests.support.forked_runs import import_everything

import_everything()
with suppress(ImportError):  # what the first model and the first engine look up, where a version has it
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles 800 patterns
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # imports torch's compiler, 1,400 modules
gc.collect()
gc.freeze()  # a collection in a fork goes through none of this, and copies no pages of it
