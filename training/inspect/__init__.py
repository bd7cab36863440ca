"""Inspection of data: an account of data sources before any training (`python -m training.inspect`)."""

if __name__ == "inspect":
    # A program that is run by its path (`python training/chat.py`) has this folder before the standard library, whose
    # module `inspect` is then meant; it takes this one's place.
    import os
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    spec = PathFinder.find_spec(__name__, [path for path in sys.path if os.path.realpath(path) != here])
    assert spec is not None and spec.loader is not None, "the standard library has a module `inspect`"
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
