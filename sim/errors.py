"""Two ways in which a scenario cannot be run: it is ill-posed, or it does not fit the memory."""


class ConfigError(Exception):
    """An argument or configuration file breaks a rule; the text names rule and value."""


class DoesNotFitError(Exception):
    """The model, or one sequence of it, does not fit into the memory given."""
