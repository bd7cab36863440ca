"""Best of n: many responses to each prompt, the best of them kept as rows for steps 1 and 2, and a curve against n."""
