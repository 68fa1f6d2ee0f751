"""HexGen-3's published plans, by our rooflines with and without its simulator's assumptions."""

from scripts.reproduce.hexgen3 import estimates
from scripts.reproduce.reproduction import Reproduction

REPRODUCTION = Reproduction(
    paper="HexGen-3",
    inputs={
        estimates.ROWS: "what python -m scripts.validate.hexgen3 writes with --output, from "
        "scheduler/ of https://github.com/Relaxed-System-Lab/HexGen-3, commit efa3ed9"
    },
    parts={"plans": estimates.plans},
    timed=("plans",),
)
