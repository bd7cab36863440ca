"""Other trainers in environments of their own (scripts/other_trainers.sh), under our recorder.

`start` runs in ours; the other programs run in theirs, and import nothing of tests but this package.
"""
