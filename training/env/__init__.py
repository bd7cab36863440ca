"""Environments outside of training: listed, played in the terminal, checked. The program: `python -m training.env`."""
