"""The command ``jaxinfer``, and ``python -m jaxinfer``."""

from jaxinfer.commands.signals import Interrupted, end_on_signals, leave


def main() -> None:
    """Run one command. A user's mistake, a full disk or a signal is one line on stderr."""
    try:
        end_on_signals()
        from jaxinfer.commands.app import main  # This takes most of a second.

        main()
    except Interrupted as ended:
        leave("; ".join([str(ended), *getattr(ended, "__notes__", [])]), ended.code)


if __name__ == "__main__":
    main()
