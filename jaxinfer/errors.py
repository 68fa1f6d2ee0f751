"""The one exception for a mistake that the user can mend, and what others say in one line."""


class JaxinferError(Exception):
    """A user's mistake: one line that names the thing, its value, and what would work.

    The command line prints the message without a traceback.
    """


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())


def raised(error: BaseException) -> str:
    """An error as part of a message: its kind and its text."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
