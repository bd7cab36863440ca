"""Finished models, asked: conversations to answers, answers to scores, scores to figures. For chat and evaluation."""
