"""Two ways in which a scenario cannot be run, ill-posed or too large for the memory; and near names to suggest."""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(Exception):
    """An argument or configuration file breaks a rule; the text names rule and value."""


class DoesNotFitError(Exception):
    """The model, or one sequence of it, does not fit into the memory given."""


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """What somebody may have meant: at most three known names that begin like it, else the closest ones."""
    names = list(known)
    return [each for each in names if name and each.startswith(name)][:3] or get_close_matches(name, names)
