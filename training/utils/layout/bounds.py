"""The most tokens that a forward holds. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

# On a CPU, more tokens make a forward's products no faster, and each holds its activations
# (docs/lab_book/2026-q4-speed-2.md); a GPU wants as many as it can hold.
SMALL_FORWARD_TOKENS = 2048


def forward_bound(
    given: int | None, sequences: int, longest_tokens: int, *, packed: bool, keeps_small: bool
) -> int | None:
    """Return the most tokens of a forward: those given; of packed rows as many as `sequences` could have, or to keep it
    small no more than `SMALL_FORWARD_TOKENS` or the longest sequence. None sets no bound."""
    if given is not None or not packed:
        return given
    most = sequences * longest_tokens
    return min(most, max(longest_tokens, SMALL_FORWARD_TOKENS)) if keeps_small else most
