"""The record of one optimizer step and the digests of all: their schema, their files, and what is read for them."""
