"""The errors of this room: a bad argument is a ValueError, bad data is one of these."""


class BadArrayError(Exception):
    """A K/V array file that cannot be used: wrong dtype, shape, or not an ``.npy`` file."""


class CorruptDataError(Exception):
    """Packed bytes that cannot have come from the encoder; ``offset`` says where in them, if known."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"byte {offset}: {message}")
        self.offset = offset
