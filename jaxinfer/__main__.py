"""``python -m jaxinfer``."""

from jaxinfer.cli import main

main()
