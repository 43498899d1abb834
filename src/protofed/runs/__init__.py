"""A run: from an experiment to a folder with its results."""
