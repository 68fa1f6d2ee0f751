"""Planners compared with brute force and with fixed systems. No paper has these comparisons."""

from scripts.reproduce.any_system import ratios as pd_ratio
from scripts.reproduce.any_system import systems as ways_to_share
from scripts.reproduce.reproduction import CONVERSATIONS, Inputs, Part, Reproduction, Work

TRACE, REQUESTS = "azure_conversation.csv", 1000


def chats(inputs: Inputs) -> Work:
    """Return the trace's first 1,000 requests."""
    return inputs.work(TRACE, REQUESTS)


def pd_ratios(inputs: Inputs) -> Part:
    """``pd_ratio`` and closed forms, compared with brute force."""
    lengths = [(item.prompt_len, item.max_tokens) for item in chats(inputs)]
    rows = pd_ratio.ratios(lengths, inputs.kept, inputs.pool)
    return Part(rows, pd_ratio.ratio_targets(rows))


def any_and_fixed(inputs: Inputs) -> Part:
    """``any_system`` and each fixed system, with seeds that the search did not use."""
    trace = str(inputs.path(TRACE))
    rows = ways_to_share.systems(trace, chats(inputs), inputs.pool)
    return Part(rows, ways_to_share.system_targets(rows))


def lengths(inputs: Inputs) -> Part:
    """Rate of each way to share a pair, by length of the prompts."""
    return Part(ways_to_share.by_length(chats(inputs), inputs.pool))


def rates(inputs: Inputs) -> Part:
    """Latencies of each way, by rate."""
    return Part(ways_to_share.by_rate(chats(inputs), inputs.pool))


def best_by_length(inputs: Inputs) -> Part:
    """The best way for each length."""
    rows = inputs.rows("lengths")
    return Part(ways_to_share.begins(rows, "mean_prompt", "requests_s", least=False))


def best_by_rate(inputs: Inputs) -> Part:
    """The best way for each rate."""
    return Part(ways_to_share.begins(inputs.rows("rates"), "rate", "ttft_p90", least=True))


def ways(inputs: Inputs) -> Part:
    """A picture of each way by length and rate."""
    return Part(pictures={"ways": ways_to_share.draw(inputs.rows("lengths"), inputs.rows("rates"))})


REPRODUCTION = Reproduction(
    paper="Planning over any system",
    inputs={TRACE: CONVERSATIONS},
    parts={
        "ratios": pd_ratios,
        "systems": any_and_fixed,
        "lengths": lengths,
        "rates": rates,
        "best_by_length": best_by_length,
        "best_by_rate": best_by_rate,
        "ways": ways,
    },
)
