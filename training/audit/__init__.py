"""The audit of a training step: what a record says was computed, recomputed from the parts before it.

The program is `python -m training.audit`; docs/audit.md describes records and what is judged.
"""
