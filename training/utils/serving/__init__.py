"""Pages for the user of this machine, and servers for who has a key: access control, and bounds on what others hold,
also as servers that are asked.

Knows nothing of what is served.
"""
