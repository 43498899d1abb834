"""Several runs in one process. Their clients are trained and tested together, as if they belonged to one run."""
