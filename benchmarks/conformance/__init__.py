"""The table of the field: the same properties of released trainers, each cell by a command."""
