"""Families of models that are more than a language model: their classes, parts and files of a processor."""
