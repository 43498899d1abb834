"""A real federation: clients that keep their data and their model, and a server that runs the rounds.

Nothing here knows what carries the bytes: see `transport.py` for what a carrier must do.
"""
