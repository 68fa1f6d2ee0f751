"""Settings of property tests: how many examples they draw, and which.

They are the same in every run, on however slow a machine. JAXINFER_HUNT=20000 hunts instead, with
random seeds and that many examples for each property.
"""

import os

from hypothesis import HealthCheck, settings

HUNT = int(os.environ.get("JAXINFER_HUNT", "0"))

settings.register_profile(
    "jaxinfer",
    max_examples=HUNT or 100,
    derandomize=not HUNT,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("jaxinfer")


def examples(count: int) -> settings:
    """Settings of a property test that draws ``count`` examples, unless a hunt is on."""
    return settings(max_examples=HUNT or count)
