"""Two instances and the transfers between them, one event at a time."""

from typing import Any

from serving_checks import make_kv, new_instance

from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.views import Leg


class Notes:
    """A world that only notes which transfers start."""

    def __init__(self) -> None:
        self.time = 5.0
        self.started: list[Transfer] = []

    def now(self) -> float:
        return self.time

    def start_transfer(self, transfer: Transfer) -> None:
        self.started.append(transfer)


class Place:
    """Three instances of 20 pages of two tokens, and the hand-offs between them."""

    def __init__(self, seats: int = 8, caching: bool = False, **options: Any) -> None:
        opts = InstanceOptions(seats, 4, watermark=0.0, **options)
        self.pools = {
            name: new_instance(name, make_kv(20, 2, [(0, 1), (2,)], caching), opts)
            for name in "ABC"
        }
        self.world = Notes()
        self.hand_offs = HandOffs(self.world, self.pools)  # type: ignore[arg-type]

    def request(self, *legs: Leg, computed: int = 6, output: int = 0, name: str = "r") -> Any:
        """A request that runs in its first leg's instance: 8 prompt tokens and at most 5 others."""
        request = RequestState(name, 8, 5)
        request.output_token_ids = [0] * output
        request.legs = list(legs)
        request.computed = request.launched = computed
        here = self.pools[legs[0].instance]
        request.hold = here.kv.reserve(max(computed, 1))
        here.taking_part.add(request)
        return request

    def sent(self) -> list[tuple[str, str, int, int]]:
        return [(t.source, t.dest, t.start, t.stop) for t in self.world.started]

    def in_use(self, name: str) -> int:
        """Pages per slice that are not free."""
        return 20 - self.pools[name].kv.num_free


CHUNKS = (Leg("A", 8, "per_chunk"), Leg("B"))


def a_batch(*requests: Any, count: int = 2, samples: bool = False) -> Batch:
    """Two more tokens for each."""
    rows = []
    for request in requests:
        row = Row(request, request.launched, count, samples, False, 0, request.hold)
        request.launched += count
        request.pending += samples
        rows.append(row)
    return Batch("A", rows, 0, 1, 0)
