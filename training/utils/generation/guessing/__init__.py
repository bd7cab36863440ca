"""Speculative decoding: guesses by a head or by n-grams, their verification and their pace."""
