"""The one exception for a mistake that the user can mend."""


class JaxinferError(Exception):
    """A user's mistake: one line that names the thing, its value, and what would work.

    The command line prints the message without a traceback.
    """
