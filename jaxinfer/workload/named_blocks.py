"""Digests for prompts of modelled runs, which are given as named blocks of tokens."""

from jaxinfer.workload.bench_request import BLOCK, BenchRequest


class Beginnings:
    """Computes digests of pages of prompts that are given as named blocks.

    Each prefix that ends with a block gets a number, from which its pages' digests are made.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def pages(self, item: BenchRequest, page_size: int) -> list[bytes]:
        """Return digests of a prompt's full pages; none if pages may lie in two blocks.

        Two digests are equal if the pages' tokens, and all tokens before them, are equal.
        """
        if BLOCK % page_size:
            return []
        # Not as long as those that ``page_digests`` makes: they are never equal.
        places = [place.to_bytes(2, "big") for place in range(BLOCK // page_size)]
        found: list[bytes] = []
        number = 0
        for name in item.hash_ids or ():
            number = self._numbers.setdefault((number, name), len(self._numbers) + 1)
            block = number.to_bytes(8, "big")
            found += [block + place for place in places]
        del found[item.prompt_len // page_size :]
        return found
