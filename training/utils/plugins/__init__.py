"""Plugins: optional features in packages of their own."""
