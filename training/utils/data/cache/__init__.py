"""The cache of tokenized splits: built once by several processes, published whole, opened in no time."""
