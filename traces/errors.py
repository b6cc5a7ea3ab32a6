"""The one error that this room raises for bad input."""


class BadTraceError(Exception):
    """A trace file that cannot be used as it is.

    Args:
        rule: what must hold, with the value that broke it.
        place: ``file`` or ``file:line`` (line counts from 1).
        mend: what the user can do about it.
    """

    def __init__(self, rule: str, place: str, mend: str = "") -> None:
        self.rule, self.place, self.mend = rule, place, mend
        super().__init__(f"{place}: {rule}" + (f"; {mend}" if mend else ""))
