"""The commands of `python -m oscar_int2`: a module each, with main(words)."""
