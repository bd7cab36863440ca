"""Routers of a mixture of experts: their balancing loss, exact for the whole optimizer step."""
