"""Imports what the programs of the tests need, in the process that they are forked from (forked_programs.py)."""

from __future__ import annotations

import gc

from tests.support.forked_runs import import_everything

import_everything()
gc.collect()
gc.freeze()  # a collection in a fork goes through none of this, and copies no pages of it
