"""Robust combination of uploads from clients that may send anything, and simulated attackers."""
