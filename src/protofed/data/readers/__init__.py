"""Readers of files, arrays and other libraries' data sets."""
