"""The one kind of error that is the user's to mend."""


class UsageError(ValueError):
    """Something the user asked for cannot be done.

    The message is one sentence: what is wrong, where, and what would be right. Commands print it
    without a traceback and exit with code 2.
    """
