"""Requests that arrive after a number of earlier requests have ended."""

from jaxinfer.serving.releases import Releases


def test_those_who_wait_for_the_same_end_come_in_their_order() -> None:
    releases: Releases[str] = Releases()
    for after, name in ((2, "c"), (1, "a"), (2, "d"), (1, "b"), (2, "e"), (4, "f")):
        releases.hold(after, name)
    assert [releases.due(), *(releases.ended() for _ in range(3))] == [
        [],
        ["a", "b"],
        ["c", "d", "e"],
        [],
    ]
    assert releases
    releases.hold(3, "late")
    assert releases.due() == ["late"]
    assert releases.ended() == ["f"]
    assert not releases
