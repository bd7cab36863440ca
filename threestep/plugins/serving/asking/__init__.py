"""Requests to services: JSON over HTTP within bounds, their pace, and the failures of requests."""
