"""The one exception for a mistake that the user can mend, and what others say in one line."""


class JaxinferError(Exception):
    """A user's mistake: one line that names the thing, its value, and what would work.

    The command line prints the message without a traceback.
    """


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
