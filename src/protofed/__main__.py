"""`python -m protofed` is the command `protofed`."""

from protofed.cli import main

main()
