"""Serving of a program's pages to its user: access control, and bounds on the resources that a visitor may hold.

Knows nothing of the pages' content.
"""
