"""What goes wrong in a secure sum."""


class SumFault(Exception):
    """A step of a secure sum cannot be done; its text is the reason, and `accused` are the members it points to."""

    def __init__(self, reason: str, *accused: int) -> None:
        super().__init__(reason)
        self.accused = accused
