"""Flags of other programs (DeepSpeed-Chat, transformers, TRL) and their counterparts here, as tables."""
