"""A group of commands, each of which is imported on first use."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands by name. Each is a function in a module of the same name, with _ for -.

    Args:
        package: package that contains the modules.
        names: names of the commands, in the order in which they are listed.
    """

    def __init__(self, *given: Any, package: str, names: Sequence[str], **named: Any) -> None:
        super().__init__(*given, **named)
        self._package, self._names = package, names

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self._names)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        if name not in self._names:
            return None
        module = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"{self._package}.{module}"), module)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command's first sentence in full, over several lines if necessary."""
        found = {name: self.get_command(context, name) for name in self.list_commands(context)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=500)) for name, each in found.items() if each]
            )
