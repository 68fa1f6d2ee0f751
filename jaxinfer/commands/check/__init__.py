"""``jaxinfer check``: each check is in the file of its name, which is imported on first use."""

import click

from jaxinfer.commands.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    package="jaxinfer.commands.check",
    names=("decisions", "replay", "rerun", "points", "hand-offs"),
)
def check() -> None:
    """Check decisions, predictions, results or KV hand-offs against what was recorded or measured.

    A check exits with 0 if it holds, 1 if it does not, and 2 if it could not be made.
    """
