"""Environments and tools that a conversation acts on: what a user writes, how calls are read and run, and what comes
back as text. Serves step 3's rollouts and programs of users. Knows nothing of tokens, models or templates' ids.
"""
