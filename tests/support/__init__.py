"""What tests share: models and texts made on the spot, command lines, the house rules."""
