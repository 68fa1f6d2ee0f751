"""The command line. Each command is in a file of its name, imported on first use."""

import errno
import os
import sys

import click

from jaxinfer import __version__
from jaxinfer.commands.lazy_group import LazyGroup
from jaxinfer.commands.signals import leave
from jaxinfer.errors import JaxinferError

COMMANDS = (
    "run", "bench", "compare", "simulate", "capacity", "plan", "sweep", "calibrate",
    "explain", "profile", "convert", "worker", "configs", "shard", "check",
)  # fmt: skip
# Commands that became checks, and their names there.
RENAMED = {
    "replay": "replay",
    "rerun": "rerun",
    "validate": "points",
    "conformance": "hand-offs",
}
# Errors of files, pipes and terminals that receive a command's output.
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


class Commands(LazyGroup):
    """All commands. Names that checks had in earlier versions work for one more release."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name, or by its name in an earlier version."""
        name, *rest = args
        if name in RENAMED:
            new = RENAMED[name]
            if name == "replay" and "--check" in rest:
                new = "decisions"
                rest.remove("--check")
            click.echo(f"jaxinfer: {name} is now `jaxinfer check {new}`", err=True)
            args = ["check", new, *rest]
        return super().resolve_command(context, args)


@click.group(
    cls=Commands,
    package="jaxinfer.commands",
    names=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        leave(error.format_message(), 2)
    except JaxinferError as error:
        leave(str(error), 2)
    except OSError as error:
        if error.errno not in _OF_OUTPUT:
            raise
        leave(f"cannot write {error.filename or 'the output'}: {error.strerror}", 2)
    sys.exit(code or 0)
