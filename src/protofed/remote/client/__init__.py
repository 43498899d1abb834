"""A client of a federation, whatever carries its messages."""
