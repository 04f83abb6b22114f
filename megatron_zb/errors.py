"""The one kind of error that is the user's to mend."""


class UsageError(ValueError):
    """Something the user asked for cannot be done.

    The message is one sentence: what is wrong, where, and what would be right. Commands print it
    without a traceback and exit with code 2. Line ends and control characters of what the user
    wrote stand in it as Python writes them, so that it stays one line.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())
