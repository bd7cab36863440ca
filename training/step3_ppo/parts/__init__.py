"""What the loop of step 3 works with: roles, prompts, evaluation, replay."""
