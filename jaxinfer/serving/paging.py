"""Options for when an instance's pages are taken, cached and freed."""

from typing import Literal

from jaxinfer.options.validation import Options


class Paging(Options):
    """Options for when pages are taken, cached and freed; both worlds can use the defaults.

    Attributes:
        take: When an admitted request gets its pages: at once for all its ``known`` tokens, or for
            each ``step`` when that is launched. There must be room for all known tokens either way.
        cache: When a full page enters the prefix cache: when its entries are ``computed``, or when
            the step that writes them is ``launched``.
        twins: Whether the prefix cache keeps a second page with the same tokens.
        free: When the pages that a request gives up become free: once they are ``unused`` by steps
            in flight, or ``at_once``, which is safe because steps run in order. Transfers are
            waited for either way.
    """

    take: Literal["known", "step"] = "known"
    cache: Literal["computed", "launched"] = "computed"
    twins: bool = False
    free: Literal["unused", "at_once"] = "unused"
