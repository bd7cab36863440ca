"""Which token sees which, and which sequences share a row, a micro-batch and a rank. Imports torch alone."""
