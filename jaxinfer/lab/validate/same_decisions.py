"""Checks that the simulator makes a real run's decisions, given the times in its ledger."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.caches.eviction import later_uses
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.resolve import Resolved, resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.lab.validate.measured_world import Measured, MeasuredWorld, measured
from jaxinfer.lab.validate.replay import profile_file, profile_of
from jaxinfer.ledger.difference import check_entries, first_difference
from jaxinfer.ledger.ledger_file import NAME, Entries, Entry, ledger_hash, read_ledger
from jaxinfer.ledger.observer import Ledger
from jaxinfer.report.origin import made_by_another
from jaxinfer.report.records import read_run_json, reporting_damage
from jaxinfer.serving.features.half_batches import by_fits, choice
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.attention import ModelledShard
from jaxinfer.simulate.cluster import ModelledInstance
from jaxinfer.steps.attention_profile import attention_path, read_attention
from jaxinfer.steps.profile import Profile


class LedgerCheck(NamedTuple):
    """How a real run's ledger compares with the one that the simulator makes for the same events.

    Args:
        difference: description of the first difference, or None.
        entries: number of entries in the real ledger.
        hash: hash of the real ledger.
        finished: whether the real run finished; if not, both ledgers end where it stopped.
    """

    difference: str | None
    entries: int
    hash: str
    finished: bool


def check_decisions(folder: Path) -> LedgerCheck:
    """Give the simulator the events of a real run, and compare the two ledgers.

    Raises:
        JaxinferError: the run kept no ledger, or its decisions cannot be repeated.
    """
    run, real = read_run_json(folder), read_ledger(folder / NAME)
    found = ledger_hash(real)
    if "measured_gb_s" not in run:
        raise JaxinferError(f"{folder}: not a real run, or one of an older version")
    for name in ("status", "run_file", "instances"):
        if not run.get(name):
            raise JaxinferError(
                f"{folder / 'run.json'}: {name} is missing: give the folder as the run left it"
            )
    kept = {"hash": found, "entries": len(real)}
    finished = run["status"] == "finished"
    if finished and run.get("ledger") != kept:
        raise JaxinferError(
            f"{folder / NAME}: not what the run wrote: {kept}, run.json has {run.get('ledger')}"
        )
    if not real:
        raise JaxinferError(f"{folder / NAME}: no entries; the run was killed before it wrote some")
    with reporting_damage(folder / NAME):
        check_entries(folder / NAME, real)
        given = measured(real)
    if given.cached:
        raise JaxinferError(
            f"{folder}: {given.cached} pages were cached by earlier runs when it began, and their "
            "tokens are not known: reset_prefix_cache before the run, or check the first one"
        )
    with reporting_damage(folder / "run.json"):
        simulated = decide_again(folder, run, given)
    if not finished:
        del simulated[len(real) :]
    difference = first_difference(real, simulated)
    if difference and (other := made_by_another(run)):
        difference += f"; {other}"
    return LedgerCheck(difference, len(real), found, finished)


def decide_again(folder: Path, run: Mapping[str, Any], given: Measured) -> list[Entry]:
    """Return the ledger of the simulator's decisions for a real run's events.

    Args:
        folder: folder of the run.
        run: contents of its ``run.json``.
    """
    site = resolve(as_run_file(run["run_file"]).model_copy(update={"ledger": False}))
    if run["instances"].keys() != site.cluster.instances.keys():
        raise JaxinferError(
            f"{folder / 'run.json'}: damaged, instances are {', '.join(run['instances'])}, its "
            f"run_file has {', '.join(site.cluster.instances)}"
        )
    modelled = {
        name: _modelled(folder, name, site, described)
        for name, described in run["instances"].items()
    }
    fits = _fits(folder, site, run)
    ledger = Ledger(Entries())
    world = MeasuredWorld(given)
    configs = site.cluster.instances.items()
    uses = later_uses((name, config.eviction, config.page_size) for name, config in configs)
    if uses:
        if missing := len(given.known) - len(given.known_requests):
            raise JaxinferError(
                f"{folder}: {missing} requests had not arrived when it ended; eviction.order is "
                "next_use, which knew their prompts, and the ledger does not have them"
            )
        uses.begin(given.known_requests)

    def new(name: str) -> Instance:
        instance = modelled[name].new_instance(
            name, fits.get(name), False, given.keeps_tokens, _max_tokens, True, uses
        )
        # Not by the costs of a model, because there are none.
        pays = by_fits(instance.shards)
        instance.halves_pay = choice(modelled[name].config.half_batches, pays)
        return instance

    def renew(name: str) -> Instance:
        instance = new(name)
        instance.follow(instances[name], world.now())
        instances[name] = instance
        return instance

    def ended(request: RequestState) -> None:
        ledger.ended(request)
        if uses:
            uses.ended(request)

    instances = {name: new(name) for name in modelled}
    for name, closed in given.without.items():
        instances[name].go_without(closed)
    loop = ServingLoop(
        ledger.around(world),
        list(instances.values()),
        site.new_system(),
        given.check_stop,
        ended,
        predict=given.predict,
        renew=renew,
    )
    ledger.watch(loop)
    run_to_its_end(loop, ledger)
    return ledger.entries.parsed()


def run_to_its_end(loop: ServingLoop, ledger: Ledger) -> None:
    """Run a loop; if it diverges from the recorded events, end its ledger there."""
    try:
        loop.run()
    except Exception as error:
        ledger.keep("failed", [one_line(error) or type(error).__name__])


def _max_tokens(request: RequestState) -> int:
    return request.max_tokens


def _modelled(
    folder: Path, name: str, site: Resolved, described: Mapping[str, Any]
) -> ModelledInstance:
    """Model an instance for scheduling, with its original limits and pools."""
    config = site.cluster.instances[name]
    # Values that the run has computed, such as limits from the available memory.
    found = {
        name: value
        for name, value in described["engine"].items()
        if name in InstanceConfig.model_fields and isinstance(value, int | float | str)
    }
    config = config.model_copy(update=found)
    stages = described["stages"]
    return ModelledInstance(
        config,
        [],
        [stage["layers"] for stage in stages],
        [stage["num_pages"] for stage in stages],
        0,
        _NO_COST,
        segments=1,
        devices=[],
        shards=_shards(folder, name, site, described) if config.is_spread else (),
    )


def _shards(
    folder: Path, name: str, site: Resolved, described: Mapping[str, Any]
) -> list[ModelledShard]:
    """Model the places of the stages' KV heads, with the fits that the run used."""
    heads, _ = described["kv_heads"]
    halves = described["engine"]["half_batches"] == "by_time"
    slowdowns = {
        stage["group"]: site.cluster.groups[stage["group"]].slowdown
        for stage in described["stages"]
    }
    profile = None
    if halves or site.needs_attention_fits:
        profile = read_attention(profile_file(folder, name, described, attention_path))
    fits = iter(profile.fits(slowdowns) if profile else ())
    dense = iter(profile.dense(slowdowns) if profile and halves else ())
    return [
        ModelledShard(
            number,
            place["group"],
            stage["layers"],
            heads if "attention" in stage else 0,
            place is stage,
            place["num_pages"],
            next(fits, None),
            next(dense, None),
            devices=devices,
            device=device,
        )
        for number, stage in enumerate(described["stages"])
        for place in (stage, *stage.get("attention", ()))
        for devices in [1 if place is stage else len(place["devices"])]
        for device in range(devices)
    ]


class _NoCost:
    """Costs that are never computed."""

    def stages(self, work: Any) -> list[float]:
        raise AssertionError("times are measured")

    hops = stages


_NO_COST: Any = _NoCost()


def _fits(folder: Path, site: Resolved, run: Mapping[str, Any]) -> dict[str, StepFit]:
    """Return the fits that the system used, by instance."""
    if not site.needs_fits:
        return {}
    found = {}
    for name in site.cluster.computing:
        described = run["instances"][name]
        profile: Profile = profile_of(folder, name, described)
        groups = [stage["group"] for stage in described["stages"]]
        found[name] = profile.fit([site.cluster.groups[group].slowdown for group in groups])
    return found
