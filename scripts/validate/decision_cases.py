"""Draws clusters and requests on which both worlds must make the same decisions."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer import SamplingParams

# A tiny Llama with random weights, because decisions do not depend on language.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
# Largest number of tokens of a request, prompt and output together.
PROMPT, OUTPUT = 110, 40
SHARES = {name: {"weight": number + 1, "max_waiting": 2} for number, name in enumerate("pqde")}
PAIRS = {"prefill": ["p", "q"], "decode": ["d", "e"]}
UNITS = [{"prefill": ["p"], "decode": ["d"]}, {"prefill": ["q"], "decode": ["e"]}]
HAND_OFFS = ("on_demand", "at_end", "when_room", "per_chunk", "per_segment")
# Attention elsewhere takes less time, so that heads are moved out.
ATTENTION = {
    "p": {"per_pair": 1e-4, "per_entry": 1e-6},
    "q": {"per_pair": 1e-4, "per_entry": 1e-6},
    "d": {"per_pair": 5e-5, "per_entry": 5e-7, "exchange": 1e-5},
    "e": {"per_pair": 6e-5, "per_entry": 5e-7, "exchange": 1e-5},
}
# For each name: groups, each with an instance, and options; one value of a tuple is drawn.
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("p", {}),
    "pipeline_parallel": ("pq", {}),
    "data_parallel": ("pqde", {"shares": SHARES}),
    "least_loaded": ("pqde", {"choose": ("power_of_two", "join_shortest_queue"),
                              "load": ("tokens", "requests")}),
    "prefix_aware": ("pqde", {"weight": (1.0, 4.0)}),
    "session_affinity": ("pqde", {}),
    "disaggregated": ("pqde", PAIRS | {"hand_off": HAND_OFFS, "max_in_prefill": (2, 4),
                                       "fetch": (False, True)}),
    "cronus": ("pd", {"partial": "p", "chunked": "d", "cut_share": (0.3, 0.6, None),
                      "hand_off": HAND_OFFS}),
    "distserve": ("pqde", {"units": UNITS}),
    "splitwise": ("pqde", {"prompt": ["p", "q"], "token": ["d", "e"],
                           "max_pending_tokens": (60, 200), "layerwise_from": (33, None)}),
    "tetriinfer": ("pqde", PAIRS | {"prefill_batch": (3, 5), "heavy_decode": 30,
                                    "report_s": 0.002, "flip_after_s": (0.004, 0.01)}),
    "hexgen2": ("pqde", {"flows": {"p": {"d": 3.0, "e": 1.0}, "q": {"e": 2.0}},
                         "hand_off": HAND_OFFS, "max_in_prefill": (3, 100)}),
    "hetis": ("pde", {"theta": (0.5, 0.1, None), "placement": ("time", "memory"),
                      "attention": (ATTENTION, {})}),
    "takeover": ("pqde", {"spared": (0.01, 0.2)}),
    "aladdin": ("pqde", {"ttft_s": 60.0, "atgt_s": 2.0, "heartbeat_s": 0.002}),
}  # fmt: skip
# For each name, differences to instances that have room.
CLUSTERS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small": {"num_pages": 20, "watermark": 0.0},
    "cached": {"num_pages": 40, "enable_prefix_caching": True},
    "meshes": {},
    "processes": {},
}
# For each name: the cluster, how requests are sampled, and what happens during the run.
WORKLOADS: dict[str, tuple[str, bool, str]] = {
    "greedy": ("roomy", False, ""),
    "seeded": ("roomy", True, ""),
    "over time": ("roomy", True, "over time"),
    "cancelled": ("roomy", False, "cancelled"),
    "preemption": ("small", True, ""),
    "prefix cache": ("cached", True, ""),
    "TP and stages": ("meshes", True, ""),
    "processes": ("processes", True, ""),
    "lost and back": ("processes", False, "lost"),
}


def sections(system: str, cluster: str, seed: int) -> dict[str, Any]:
    """Return a run file of a system on a cluster."""
    rng = random.Random(f"{seed} {system} {cluster}")
    names, given = SYSTEMS[system]
    options = {name: _one(rng, value) for name, value in given.items()}
    engine = {
        "max_num_seqs": 16 if system in ("aladdin", "takeover", "cronus") else rng.choice([3, 4]),
        "max_num_batched_tokens": rng.choice([24, 32]),
        "page_size": 8,
        "num_pages": 65,
        "enable_prefix_caching": False,
        "max_model_len": 256,
        "policies": rng.choice([
            {}, {}, {"order": "shortest_prompt_first"}, {"admit": "whole_request"},
            {"batching": "even_decodes"},
        ]),
        "load_format": "dummy",
    } | CLUSTERS[cluster]  # fmt: skip
    if not engine["enable_prefix_caching"]:
        options.pop("fetch", None)
    groups: dict[str, dict[str, Any]] = {name: {} for name in names}
    if system == "hetis" and cluster != "cached":
        groups, instances = _spread(rng, groups, cluster, engine)
    elif system == "pipeline_parallel":
        groups, instances = _pipeline(groups, cluster, engine)
    else:
        instances = {name: {"group": name} | engine for name in names}
        if cluster == "meshes":
            _as_meshes(groups, instances)
        elif cluster == "roomy" and "hand_off" in options:
            instances["p"]["segments"] = 2
    if cluster == "processes":
        # Otherwise, an attention group returns alone.
        whole = len(instances) > 1 or len(groups) == 1
        groups = {
            name: group | {"process": "own"} | ({"restart": 1} if whole or name == "d" else {})
            for name, group in groups.items()
        }
    return {
        "groups": groups,
        "instances": instances,
        "system": {"name": system} | options,
        "ledger": True,
    }


def _one(rng: random.Random, value: Any) -> Any:
    return rng.choice(value) if isinstance(value, tuple) else value


Sections = dict[str, dict[str, Any]]


def _spread(
    rng: random.Random, groups: Sections, cluster: str, engine: dict[str, Any]
) -> tuple[Sections, Sections]:
    """Add an instance whose heads may be on two more groups, or whose two stages share a group.

    If there is room, the shared group has two devices.
    """
    # A request of 19 pages for each of two heads just fits into the small ones.
    own, near, far = (12, 11, 8) if cluster == "small" else (30, 14, 12)
    pools = [{"group": "d", "num_pages": near}, {"group": "e", "num_pages": far}]
    halves = rng.choice(["never", "by_time", "always"])
    stages: list[dict[str, Any]] = [{"group": "p", "attention": pools}]
    if cluster == "meshes":
        groups = groups | {"p": {"devices": 2}, "e": {"devices": 2}, "q": {}}
        stages = [
            {"group": "p", "layers": 1, "attention": pools},
            {"group": "q", "layers": 1, "attention": pools[1:]},
        ]
    elif cluster != "small":
        groups = groups | {"d": {"devices": 2}}
    more = {"num_pages": own, "stages": stages, "half_batches": halves}
    return groups, {"x": engine | more}


def _pipeline(groups: Sections, cluster: str, engine: dict[str, Any]) -> tuple[Sections, Sections]:
    """Return two stages; they are on one group if that group's process is restarted."""
    names = ["p", "q"]
    if cluster == "meshes":
        groups = {name: {"devices": 2, "tensor_parallel_size": 2} for name in names}
    elif cluster == "processes":
        groups, names = {"p": {"devices": 2, "tensor_parallel_size": 1}}, ["p", "p"]
    stages = [{"group": name, "layers": 1} for name in names]
    return groups, {"x": engine | {"stages": stages}}


def _as_meshes(groups: Sections, instances: Sections) -> None:
    """Give the first instance two devices, and the last one larger pages and two stages."""
    names = [*instances]
    first, last = names[0], names[-1]
    groups[first] = {"devices": 2, "tensor_parallel_size": 2}
    if last == first:
        stages = [{"group": first, "layers": 1}, {"group": "q", "layers": 1}]
    else:
        stages = [{"group": last, "layers": 1}, {"group": "q2", "layers": 1}]
        instances[last] |= {"page_size": 16}
    groups[stages[1]["group"]] = {}  # type: ignore[index]
    del instances[last]["group"]
    instances[last]["stages"] = stages


def asked(rng: random.Random, drawn: bool) -> list[tuple[list[int], SamplingParams]]:
    """Return nine prompts with sampling options; those of over 40 tokens begin alike."""
    shared = [rng.randrange(256) for _ in range(PROMPT)]
    found = []
    for number in range(9):
        length = rng.randint(3, PROMPT)
        own = [rng.randrange(256) for _ in range(length)]
        prompt = shared[: length - 4] + own[:4] if length > 40 else own
        how: Mapping[str, Any] = {"temperature": 0}
        if drawn:
            how = {
                "temperature": 1.0,
                "n": rng.randint(1, 3),
                "stop_token_ids": rng.sample(range(256), 12),
            }
        params = SamplingParams(max_tokens=rng.randint(1, OUTPUT), seed=number, **how)
        found.append((prompt, params))
    return found


def wait_for(there: Callable[[], object], sleep: Callable[[float], None]) -> None:
    """Poll until something is there."""
    while not there():
        sleep(0.01)
