"""Rollouts that are drawn while training goes on, by weights that are some steps old (`--rollouts_ahead`)."""
