import gc
import subprocess
import sys

import pytest
import torch  # noqa: F401 (as in a notebook that imported it before)

from training.utils.run.program import quick_imports


def test_garbage_is_not_looked_for_inside_and_is_again_behind():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0  # these objects are not a program's imports alone


def test_an_error_gives_the_collector_back():
    with pytest.raises(ImportError), quick_imports():
        import no_such_package  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_program_never_looks_through_its_imports_again():
    code = """
import gc, sys
from training.utils.run.program import quick_imports
counts = [gc.get_freeze_count()]
with quick_imports():
    sys.modules["torch"] = json = __import__("json")  # stands for it
counts.append(gc.get_freeze_count())
with quick_imports():
    import decimal, email, asyncio  # what follows is the same program's
counts.append(gc.get_freeze_count())
print(*counts, gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    none, first, second, collects = done.stdout.split()
    assert none == "0" and 0 < int(first) < int(second) and collects == "True"
