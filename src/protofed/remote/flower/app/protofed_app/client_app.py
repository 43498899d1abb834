"""Flower asks for a ClientApp. protofed's clients answer by themselves and never fetch this program."""

from flwr.clientapp import ClientApp

app = ClientApp()
