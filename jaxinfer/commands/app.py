"""The command line. Each command is in a file of its name, imported on first use."""

import errno
import os
import sys
from importlib import import_module

import click

from jaxinfer import __version__
from jaxinfer.commands.signals import leave
from jaxinfer.errors import JaxinferError

COMMANDS = (
    "run", "bench", "compare", "simulate", "replay", "capacity", "plan", "sweep",
    "calibrate", "explain", "profile", "convert", "worker",
    "conformance", "configs", "rerun", "shard", "validate",
)  # fmt: skip
# Errors of files, pipes and terminals that receive a command's output.
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


class Commands(click.Group):
    """The commands of ``COMMANDS``, each imported on first use."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        if name not in COMMANDS:
            return None
        home = import_module(f"jaxinfer.commands.{name}")
        command: click.Command = getattr(home, name)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command's first sentence in full, over several lines if necessary."""
        found = {name: self.get_command(context, name) for name in self.list_commands(context)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=500)) for name, each in found.items() if each]
            )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jaxinfer")
def cli() -> None:
    """Run and study LLM inference in JAX."""


def main() -> None:
    """Run one command: a user's mistake is one line on stderr and exit code 2."""
    # For a system of the user's own. It comes last, so that the folder does not hide installed
    # modules.
    sys.path.append(os.getcwd())
    try:
        code = cli(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        leave(error.format_message(), 2)
    except JaxinferError as error:
        leave(str(error), 2)
    except OSError as error:
        if error.errno not in _OF_OUTPUT:
            raise
        leave(f"cannot write {error.filename or 'the output'}: {error.strerror}", 2)
    sys.exit(code or 0)
