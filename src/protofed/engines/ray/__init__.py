"""The Ray engine: stacked engines on the machines of a cluster."""
