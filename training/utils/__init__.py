"""The rooms that the three steps share. Nothing here imports a step."""
