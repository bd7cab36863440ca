"""The names of what guesses tokens in speculative rollouts. Cheap to import."""

from __future__ import annotations

# A head for multi-token prediction, or what followed the same tokens before (`ngrams`).
GUESSERS = BY_HEAD, BY_NGRAMS = "head", "ngram"
