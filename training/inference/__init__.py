"""Finished models, for chat and evaluation: conversations to answers, answers to scores, scores to figures."""
