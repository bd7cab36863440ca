"""Pages for the user of this machine, servers for who has a key, and requests to services: who may ask, and bounds on
what others hold, also as servers that are asked.

Knows nothing of what is served.
"""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin("serving", "HTTP servers and requests, for other plugins")
