"""The stacked engine: clients of one architecture train at once."""
