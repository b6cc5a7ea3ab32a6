"""The one error that this room raises for bad input."""

#: Characters of each part that are shown; all may hold what the file holds.
_SHOWN = 500


class BadTraceError(Exception):
    """A trace file that cannot be used as it is. Its text is one line that is safe to print.

    Args:
        rule: what must hold, with the value that broke it.
        place: ``file`` or ``file:line`` (line counts from 1).
        mend: what the user can do about it.
    """

    def __init__(self, rule: str, place: str, mend: str = "") -> None:
        self.rule, self.place, self.mend = map(_one_line, (rule, place, mend))
        super().__init__(f"{self.place}: {self.rule}" + (f"; {self.mend}" if mend else ""))


def _one_line(text: str) -> str:
    plain = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return plain if len(plain) <= _SHOWN else f"{plain[: _SHOWN - 100]}…{plain[-99:]}"
