"""An instance for everything, be its layers on one group or on several."""

from types import SimpleNamespace

import pytest

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import Assignment, NoOptions
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.systems.single import PipelineParallel, Single


@pytest.mark.parametrize("kind", [Single, PipelineParallel])
def test_everything_goes_there_at_once(kind: type[Single]) -> None:
    system = kind()
    system.check(["only"])
    assert isinstance(system.options, NoOptions)
    assert not list(system.routes(["only"]))
    assert not any((system.needs_decode_rows, system.needs_fits, system.ttft_counts_transfer))
    assert system.tick_interval is None
    waiting = [SimpleNamespace(id=name, prompt_len=9) for name in ("a", "b", "c")]
    cluster = ClusterView(0.0, {"only": None})  # type: ignore[dict-item]
    assert system.route(waiting, cluster) == [  # type: ignore[arg-type]
        Assignment(name, (Leg("only"),)) for name in ("a", "b", "c")
    ]


@pytest.mark.parametrize(("names", "there"), [(["x", "y"], "x, y"), ([], "")])
def test_one_instance_alone(names: list[str], there: str) -> None:
    with pytest.raises(
        JaxinferError, match=f"^needs exactly one instance, but the run file has {there}$"
    ):
        Single().check(names)
