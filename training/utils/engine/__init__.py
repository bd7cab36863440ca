"""DeepSpeed: its configuration, start-up, and the exact scaling of losses. The only room that imports it."""
