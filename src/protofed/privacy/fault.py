"""What goes wrong in a secure sum."""


class SumFault(Exception):
    """A step of a secure sum cannot be done; its text is the reason, and `accused` are the members it points to."""

    def __init__(self, reason: str, *accused: int) -> None:
        super().__init__(reason)
        self.accused = accused


class SpoiltSum(SumFault):
    """A sum that was opened is none: a member masked with other numbers than it shared, and nobody sees which."""


class NoSecret(SumFault):
    """No set of shares gives a secret. `sure`: whatever shares are taken, or these agree on another secret."""

    def __init__(self, reason: str, sure: bool) -> None:
        super().__init__(reason)
        self.sure = sure
