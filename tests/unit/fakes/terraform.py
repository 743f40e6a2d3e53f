"""A fake Terraform: creates machines as files in the fake cloud's directory and keeps a state.

`fault.json` names the next fault. Each fault happens once.
"""

import json
import os
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])


def main() -> None:
    """Carries out one command."""
    command, stack = sys.argv[1], Path.cwd().name
    with (CLOUD / "runs").open("a") as runs:
        runs.write(f"{command} {stack}\n")
    if command == "init":
        return
    fault_file = CLOUD / "fault.json"
    fault = json.loads(fault_file.read_text()) if fault_file.exists() else {}
    if fault and fault["command"] == command:
        fault_file.unlink()
    else:
        fault = {}
    if stack.startswith("network-"):
        (CLOUD / "networks").mkdir(exist_ok=True)
        (CLOUD / "networks" / stack).write_text(Path("network.auto.tfvars.json").read_text())
        fail(fault)
        return
    print(json.dumps({"type": "version", "terraform": "1.11.4", "ui": "1.2"}))
    values = json.loads(Path("environments.auto.tfvars.json").read_text())["environments"]
    machines = {f"{name}/{role}": spec for name, value in values.items() for role, spec in value["machines"].items()}
    if fault and not fault["creates"]:
        fail(fault)
    state = Path("terraform.tfstate")
    existing = json.loads(state.read_text()) if state.exists() else []
    if command == "state":
        [action, address] = sys.argv[2:]
        assert action == "rm"
        environment = address.removeprefix('module.environment["').removesuffix('"]')
        state.write_text(json.dumps([name for name in existing if name.partition("/")[0] != environment]))
        return
    wanted = [] if command == "destroy" else list(machines)
    for name in set(wanted) - set(existing):
        path = CLOUD / "machines" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:  # fails for a machine that exists
            file.write(json.dumps(machines[name]))
    for name in set(existing) - set(wanted):
        (CLOUD / "machines" / name).unlink(missing_ok=True)
    if fault:  # killed before it saved its state
        fail(fault)
    state.write_text(json.dumps(wanted))
    endpoints = json.loads((CLOUD / "endpoints.json").read_text())
    outputs = {
        name: {"machines": {role: endpoints[name][role] for role in values[name]["machines"]}} for name in values
    }
    print(json.dumps({"type": "outputs", "outputs": {"environments": {"value": outputs}}}))


def fail(fault: dict[str, str]) -> None:
    """Ends as Terraform does after an error, if there is a fault."""
    if not fault:
        return
    diagnostic = {"severity": "error", "summary": fault["summary"], "detail": ""}
    if fault["environment"]:
        diagnostic["address"] = f'module.environment["{fault["environment"]}"].machine'
    print(json.dumps({"type": "diagnostic", "@message": fault["summary"], "diagnostic": diagnostic}))
    sys.exit(1)


main()
