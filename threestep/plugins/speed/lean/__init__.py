"""Forwards that keep less for the backward and compute the rest again, with the same bits."""
