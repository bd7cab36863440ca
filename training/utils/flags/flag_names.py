"""The names of flags: as they are typed, and suggestions for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from training.utils.plugins.registry import added

_MOST = 3
_ALIKE, _SLIP = 0.72, 0.9  # how much of two names is the same where one may be meant by the other, or is a slip of it


def flag_in(word: str) -> str:
    """Return the flag in a word of the command line, spelled as flags are here; "" for a value. As for argparse, a name
    may have dashes for underscores, and its value behind `=`."""
    return f"--{word[2:].partition('=')[0].replace('-', '_')}" if word.startswith("--") else ""


def nearest_flags(name: str, names: Sequence[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the flags in `names` that `name` may stand for, or "" if there is none:
    a slip of the pen, what people mean by it, flags with all its words, flags that are written much alike."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    known = [flag.replace("-", "_") for flag in names]
    alike = difflib.get_close_matches(plain, known, n=_MOST, cutoff=_ALIKE)
    slips = [flag for flag in alike if difflib.SequenceMatcher(None, flag, plain).ratio() > _SLIP]
    words = set(plain.split("_"))
    with_words = sorted((flag for flag in known if words < set(flag.split("_"))), key=len)
    meant = added("meant_flags", ())
    found = [
        *slips[:1],
        *([flag for flag in meant[plain] if flag in known] if plain in meant else [*alike[:1], *with_words, *alike]),
    ]
    shown = " or ".join(f"'{flag}'" for flag in list(dict.fromkeys(found))[:_MOST])
    return f"; did you mean {shown}?" if shown else ""
