"""Rewards that score text: named rules, functions of users, and the code that calls them."""
