"""The error of a request that cannot be run. Templates and tokenizers raise it, in the router too, and therefore it stands
apart from the sampling parameters."""


class InvalidRequest(ValueError):
    """Raised for a request that cannot be run. `field` is the name that the user wrote."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message
