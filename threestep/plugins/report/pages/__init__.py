"""The form of every page: style, scripts, sections."""
