"""The version of protofed."""

VERSION = "0.1.0"
