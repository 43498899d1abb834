"""The experiment: its file, sections and keys, and the methods that can be named in it."""
