"""Versions of what rows hold, by the code that makes them. Every cache's fingerprint has them.

Give an entry another text whenever the same sources make other rows: caches are built again then, and a run that
resumes learns of it. Hashes among these texts are those of the files when versions took their place, by which earlier
caches and checkpoints are known. 2: a row has the ids of its whole text, and turns end as the chat template ends them.
"""

from __future__ import annotations

# Sources, chat templates, tokens, truncation and layout.
ROWS = "2"
# The package's dataset classes, by the last name of their module. A class that is missing here counts by its
# module's `ROWS_VERSION`, or else by its file.
CLASSES = {
    "raw_dataset": "232592cdef2f77529703093615eee18a18d5402b4f17b345a4525525f551d147",
    "file_dataset": "2",
    "prompts": "a38a98074f1b45fb0cb6aa37b95943969db5faa2cc44dbce549e2fbc41adddb8",
    "embedded": "4361694cce6803f8e36a279306de1b1f23deb8061f79271ea14eabf84cbdc05f",
}
