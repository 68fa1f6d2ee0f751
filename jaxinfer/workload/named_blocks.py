"""Prompts whose blocks of tokens have names, as a modelled run has them."""

from jaxinfer.workload.bench_request import BLOCK, BenchRequest


class Beginnings:
    """Digests of pages of such prompts: each beginning, up to a block's end, gets one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def pages(self, item: BenchRequest, page_size: int) -> list[bytes]:
        """Digests of a prompt's full pages; none where pages reach from block to block.

        Two are equal where the pages' tokens, and all before them, are.
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
