"""Parts of step 3's loop: roles, prompts, evaluation, replay."""
