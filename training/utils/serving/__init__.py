"""Pages that a program serves to its user: who may read them, and how much of the machine a visitor may hold.

Knows nothing of what a page shows.
"""
