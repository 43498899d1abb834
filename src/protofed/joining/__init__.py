"""Clients that join a run later."""
