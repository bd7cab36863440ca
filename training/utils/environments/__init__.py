"""Environments and tools that a conversation acts on: users' classes, the reading and running of calls, and their
results as text. Serves step 3's rollouts and programs of users. Knows nothing of tokens, models or templates' ids.
"""
