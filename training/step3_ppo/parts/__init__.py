"""Parts of a run of step 3: its inputs, models and settings, evaluation, reports."""
