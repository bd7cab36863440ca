"""Files that a program is given, as values of known types."""
