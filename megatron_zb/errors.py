"""The error for everything that the user can correct."""


class UsageError(ValueError):
    """Error for a request of the user that cannot be carried out.

    The message is one sentence: what is wrong, where, and what would be right. Commands print it
    without a traceback and exit with code 2. Line ends and control characters of what the user
    wrote stand in it as Python writes them, so that it stays one line.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())
