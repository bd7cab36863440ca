"""The models of step 3."""
