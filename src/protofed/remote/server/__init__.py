"""The server of a federation, whatever carries its messages."""
