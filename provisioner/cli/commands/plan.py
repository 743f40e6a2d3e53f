"""The command `plan`: what a task takes and costs at most."""

from __future__ import annotations

from datetime import timedelta

from provisioner.base.clock import BUILDER_TTL, format_duration, now
from provisioner.cli.family_sessions import destinations, family_session
from provisioner.cli.options import AllowOption, EnvFileOption, FamilyArgument, Launch, TaskArgument
from provisioner.cli.output import Result, names_in_line, table
from provisioner.clouds.registry import Where
from provisioner.costs.prices import dollars, hourly
from provisioner.environment.planning import Forecast, forecast
from provisioner.family.check import refuse_mistakes


def main(
    family: FamilyArgument,
    task: TaskArgument,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Shows machines, image, internet access, prices and the worst-case cost."""
    opened, loaded = family_session(family, env_file, where, launch)
    checked = refuse_mistakes(loaded, task, opened.variables if env_file else None)
    allowed = destinations(allow)
    allowlist = opened.cloud.check_allowlist(allowed)
    estimate = forecast(opened, loaded, task, checked, allowlist=bool(allowed))
    data = {**estimate.model_dump(mode="json"), "allowlist": allowlist}
    today = now().date()
    for line, priced in zip(data["lines"], estimate.lines, strict=True):
        line["age_days"] = priced.age_days(today)
    return Result(data, _plan_text(estimate, allowlist))


def per_thousand(estimate: Forecast, ttl: str) -> str:
    """Says what a thousand runs of the task cost, usually and at most.

    Args:
        ttl: the time to live, in words.
    """
    runs = estimate.earlier_runs
    earlier = f"as this task's {runs} earlier run{'s' * (runs != 1)} cost"
    why = earlier if runs else f"at the usual price if each lives for its ttl of {ttl}"
    usual, worst = dollars(1000 * estimate.usual_micro_usd), dollars(1000 * estimate.worst_micro_usd)
    return f"1,000 runs: about {usual}, {why}; at most {worst}."


# Of a family whose image is not built yet: whether a task has an aux VM, as far as that is known.
_AUX_VM = {
    False: "none in the module; certain once the image is built",
    None: "not known until the family's image is built",
}


def _plan_text(estimate: Forecast, allowlist: str) -> str:
    today = now().date()
    internet = {True: "full", False: "none", None: "not known until the family's image is built"}[
        estimate.full_internet
    ]
    ttl = format_duration(timedelta(seconds=estimate.limit_seconds))
    lines = [
        f"{estimate.family}, task {estimate.task}, on {estimate.cloud}"
        f"{' in ' + estimate.region if estimate.region else ''}",
        f"  internet: {internet}",
        f"  base image: {estimate.base_image}",
        f"  image: {estimate.image or estimate.outlook}",
    ]
    for role, size in estimate.machines.items():
        kind = f"{size.types[0]}, " if size.types else ""
        lines.append(f"  {role}: {kind}{size.cpus} vCPU, {size.memory_gib:g} GiB, {size.disk_gib} GiB disk")
    others = {"accelerator": estimate.accelerator, "room": estimate.room, "allowlist": allowlist}
    lines += [f"  {name}: {words}" for name, words in others.items() if words]
    if not estimate.image:
        lines.append(f"  aux VM: {_AUX_VM[estimate.has_aux_vm]}")
    if estimate.needs:
        lines.append(f"  variables: {names_in_line(estimate.needs)} not set; set them in the file of --env-file")
    if not estimate.lines:
        return "\n".join([*lines, "", f"Costs nothing: the machines are your own. Time to live {ttl}."])
    rows = [
        [line.what, f"{line.usd_per_hour:.4f}", f"{line.worst_usd_per_hour:.4f}", line.source,
         f"{line.as_of} ({line.age_days(today)} days)"]
        for line in estimate.lines
    ]  # fmt: skip
    worst = dollars(estimate.worst_micro_usd)
    sends = f" and sends {estimate.egress_gb:g} GB" if estimate.egress_gb else ""
    lines += [
        "",
        table(["PART", "USD/HOUR", "AT MOST", "PRICE FROM", "DATE"], rows),
        "",
        f"Per hour {hourly(estimate.lines):.4f} USD. At most {worst}, "
        f"if it lives for its whole time to live of {ttl}{sends}.",
    ]
    lines.append(per_thousand(estimate, ttl))
    if estimate.image is None:
        builder = dollars(estimate.builder_micro_usd)
        lines.append(f"Each image to be built: at most {builder} (time to live {format_duration(BUILDER_TTL)}).")
    if estimate.not_included:
        lines.append(f"Not included: {estimate.not_included}.")
    return "\n".join(lines)
