"""The exception for mistakes that users can correct, and one-line texts of other exceptions."""

import os
import traceback

# Errors of a user's code that is called; sys.exit() there is an error like any other.
FAILURES = (Exception, SystemExit)

_HERE = os.path.dirname(__file__) + os.sep


class JaxinferError(Exception):
    """A user's mistake: one line that names the option or file, its value, and what would work.

    The command line prints the message without a traceback.
    """


class OnlyInstanceLost(JaxinferError):
    """A run's only instance is lost, with the requests that have not ended."""


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())


def raised(error: BaseException) -> str:
    """Describe an exception of a user's code for a message: its kind, its text, and its place."""
    text = one_line(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_HERE, "<"))]
    # A syntax error states its own place, and has no frame there.
    if not theirs or isinstance(error, SyntaxError):
        return said
    return f"{said} ({theirs[-1].filename}, line {theirs[-1].lineno})"
