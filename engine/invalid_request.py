"""The error of a request that cannot be run. Templates and tokenizers raise it, in the router too, and therefore it stands
apart from the sampling parameters."""


class InvalidRequest(ValueError):
    """Raised for a request that cannot be run. `field` is the name that the user wrote."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


def check_unicode(text: str, field: str) -> str:
    """Return the text; raise InvalidRequest if it has half of a surrogate pair, which JSON and Python allow."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise InvalidRequest(field, f"{half}; not Unicode") from None
    return text
