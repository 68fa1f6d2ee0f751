"""Options of when an instance's pages are taken, cached and freed."""

from typing import Literal

from jaxinfer.options.validation import Options


class Paging(Options):
    """Options for when pages are taken, cached and freed; both worlds can use the defaults.

    Attributes:
        take: Pages that an admitted request gets at once: for all its ``known`` tokens, or those of
            each ``step`` as it is launched. There must be room for all known tokens either way.
        cache: Whether the prefix cache takes in a full page when its entries are ``computed``, or
            when the step that writes them is ``launched``.
        twins: Whether the prefix cache keeps a page if it has one with the same tokens already.
        free: Whether pages that a request has given up come free once they are ``unused`` by steps
            in flight, or ``at_once``: steps run in order, so a later step writes after an earlier
            one. Transfers are waited for either way.
    """

    take: Literal["known", "step"] = "known"
    cache: Literal["computed", "launched"] = "computed"
    twins: bool = False
    free: Literal["unused", "at_once"] = "unused"
