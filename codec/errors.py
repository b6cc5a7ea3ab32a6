"""The errors of this room: a bad argument is a ValueError, bad data is one of these."""


class BadArrayError(Exception):
    """A K/V array file that cannot be used: wrong dtype, shape, or not an ``.npy`` file."""


class CorruptDataError(Exception):
    """Packed bytes that cannot have come from the encoder."""
