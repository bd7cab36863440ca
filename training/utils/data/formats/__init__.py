"""Formats of rows: columns, records, chat messages, marks, trees, and how a file's format is recognised."""
