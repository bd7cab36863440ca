"""Builds the documentation's site: `python docs/site/build.py`, which is `make docs`.

Pages are gathered from the checkout (pages.py), the reference is made from the code (flags.py, modules.py, plugins.py),
and Sphinx makes HTML of both. Every warning is an error: a link that leads nowhere, a page that no list names. Nothing
is downloaded, and the site needs no network.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python docs/site/build.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="the folder of the site")
    parser.add_argument("--without_modules", action="store_true", help="leave out the Python reference: much faster")
    options = parser.parse_args()
    try:
        from sphinx.cmd.build import build_main
    except ImportError:
        print("error: expected Sphinx, found none: pip install -c constraints.txt -e .[docs]", file=sys.stderr)
        return 1
    sys.path[:0] = [str(HERE), str(ROOT)]
    import flags
    import modules
    import pages
    import plugins

    source = options.out.with_name(options.out.name + "_pages")
    shutil.rmtree(source, ignore_errors=True)
    generated = flags.pages() | plugins.pages()
    if not options.without_modules:
        generated |= modules.pages()
    pages.gather(source, generated)
    # -j auto reads pages in several processes; -W: warnings are errors, all of them shown.
    code = build_main(["-b", "html", "-q", "-W", "--keep-going", "-c", str(HERE), str(source), str(options.out)])
    if code == 0:
        print(f"the site is in {options.out / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
