"""Conversations: from messages to the tokens of a chat template, and which of them are trained on."""
