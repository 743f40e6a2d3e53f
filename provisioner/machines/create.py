"""Creates an environment's machines: writes record and keys first, then runs one apply for a whole stack."""

from __future__ import annotations

from collections.abc import Mapping

from provisioner.base.errors import CapacityError, InfrastructureError, TerraformError
from provisioner.base.models import Distribution, Endpoint, Environment, Role
from provisioner.clouds.cloud import UNFINISHED, StackValues
from provisioner.session import Session
from provisioner.ssh.keys import KeyPair, ed25519_key_pair, rsa_key_pair
from provisioner.store.files import locked, write_atomically
from provisioner.terraform.process import product_that_runs
from provisioner.terraform.render import EnvironmentSpec, MachineSpec, render_network, render_stack
from provisioner.terraform.stack import Stack
from provisioner.version import __version__

# Prefix of the names of stacks that environments share.
NETWORK_STACK = "network-"


def stack_of(session: Session, environment: Environment) -> Stack:
    """Returns the Terraform root that the environment belongs to."""
    variables = session.cloud.terraform_variables
    return Stack(session.home.stacks / environment.stack, check=session.check, cloud_variables=variables)


def discard_unused_stacks(session: Session) -> None:
    """Removes the directories of stacks without environments, which a crash during their removal leaves behind."""
    # Directories first: a record is written before its stack.
    directories = [path for path in session.home.stacks.glob("*/") if not path.name.startswith((".", NETWORK_STACK))]
    if session.environments.unreadable():
        return
    in_use = {environment.stack for environment in session.environments.readable()}
    for directory in directories:
        if directory.name not in in_use:
            Stack(directory).discard()


def aux_user(distribution: Distribution | None) -> str:
    """Returns the user of an aux VM: that of the distribution's own cloud image (Task Standard, VMSpec)."""
    return "ubuntu" if distribution == "ubuntu-20.04-cuda" else "admin"


def record_environment(session: Session, environment: Environment, task_key: KeyPair | None = None) -> None:
    """Writes the record, the keys and the files that the machines boot with. Creates nothing in the cloud.

    Each environment has a controller key and, if it has an aux VM, an RSA key for the task to reach it.

    Args:
        task_key: the RSA key, if the task has it already; None for a new one.
    """
    session.home.make()
    session.environments.save(environment)
    keys = {"controller": ed25519_key_pair()}
    if "aux" in environment.machines:
        keys["task"] = task_key or rsa_key_pair()
    session.environments.write_keys(environment.id, keys)
    controller = keys["controller"].public + "\n"
    authorized_keys: dict[Role, dict[str, str]] = {role: {"agent": controller} for role in environment.machines}
    if "aux" in environment.machines:
        user = aux_user(environment.machines["aux"].distribution)
        authorized_keys["aux"] = {user: controller + keys["task"].public + "\n"}
    session.cloud.prepare(environment, authorized_keys)


def create_machines(session: Session, environments: list[Environment]) -> list[Environment]:
    """Creates the machines of one stack's environments with one apply, and another after each lack of capacity.

    Args:
        environments: recorded environments of one stack. One that has a placement keeps it, since it may exist.

    Returns:
        their records, with endpoints.

    Raises:
        TerraformError: Terraform failed; destroy finds what it created.
        CapacityError: the cloud has no capacity for a machine; destroy finds what was created.
    """
    cloud, stack = session.cloud, stack_of(session, environments[0])
    placed = {
        each.id: session.environments.update(each, placement=each.placement or cloud.place(each))
        for each in environments
    }
    first = next(iter(placed.values()))
    create_shared_network(session, first)
    new = [each for each in placed.values() if not each.endpoints]
    while True:
        stack.write(root_files(session, list(placed.values())))
        cloud.acquire_launches(first, sum(len(each.machines) for each in new), session.progress.note, session.check)
        try:
            outputs = stack.apply(session.progress.note, cloud.parallelism)
            break
        except TerraformError as error:
            moved = _moved(session, placed, error)
            for name in moved:
                if moved[name].placement == placed[name].placement:  # it is gone from there
                    stack.release(name, session.progress.note)
            placed |= moved
            new = list(moved.values())
    created = [
        session.environments.update(
            each,
            endpoints=_endpoints(outputs, each),
            usd_per_hour=cloud.usd_per_hour(each),
            versions={"provisioner": __version__, **stack.versions(), **cloud.versions(each)},
        )
        for each in placed.values()
    ]
    for environment in created:
        for role, endpoint in environment.endpoints.items():
            if endpoint.origin not in ("", "template", "boot", "snapshot"):
                session.progress.note(
                    f"{environment.id}: the {role} machine boots, not started from a template: "
                    f"{endpoint.origin.removeprefix('boot: ')}"
                )
    return created


def root_files(session: Session, environments: list[Environment]) -> dict[str, str]:
    """Renders the files of the Terraform root of placed environments."""
    cloud = session.cloud
    values = {environment.id: cloud.stack_values(environment) for environment in environments}
    specs = {environment.id: _spec(session, environment, values[environment.id]) for environment in environments}
    return render_stack(cloud.name, cloud.module_variables, specs) | dict(values[environments[0].id].root_files)


def create_shared_network(session: Session, environment: Environment) -> None:
    """Creates the network that all environments of a place share, unless it exists. One controller at a time.

    Raises:
        CapacityError: there is no room for it in this place.
        HostError: the cloud refuses these credentials or this account.
        TerraformError: any other failure of Terraform.
    """
    cloud = session.cloud
    if (network := cloud.shared_network(environment)) is None:
        return
    with locked(session.home.locks / f"shared-{network.stack}"):
        directory = session.home.stacks / network.stack
        stack = Stack(directory, cloud_variables=cloud.terraform_variables)
        unfinished = directory / UNFINISHED
        if unfinished.exists():
            session.progress.note("The last attempt was interrupted; removing what it created")
            network.remove()
            unfinished.unlink()
        # Another process or controller may have created it by now.
        if (network := cloud.shared_network(environment)) is None:
            return
        session.progress.note("Creating the network that all environments there share (only once)")
        stack.write(render_network(cloud.name, network.values) | network.root_files)
        if network.new:
            write_atomically(unfinished, "")
        try:
            stack.apply(session.progress.note, cloud.parallelism, refresh=True)
        except TerraformError as error:
            cloud.explain_network_failure(environment, error)
            raise
        unfinished.unlink(missing_ok=True)


def _moved(session: Session, placed: Mapping[str, Environment], error: TerraformError) -> dict[str, Environment]:
    """Moves what Terraform failed on to other places; a CapacityError names the environments that have none left."""
    moved = {}
    exhausted: dict[str, CapacityError] = {}
    for name in error.environments & placed.keys() or placed.keys():
        try:
            next_place = session.cloud.next_place(placed[name], error)
        except CapacityError as nowhere:
            exhausted[name] = nowhere
            continue
        if next_place is None:
            raise error
        reason, place = next_place
        session.progress.note(f"{name}: {reason}")
        moved[name] = session.environments.update(placed[name], placement=place)
    if exhausted:
        first = next(iter(exhausted.values()))
        first.environments = frozenset(exhausted)
        raise first from error
    return moved


def _spec(session: Session, environment: Environment, values: StackValues) -> EnvironmentSpec:
    public_key = session.environments.key(environment.id, "controller").public
    return EnvironmentSpec(
        environment_id=environment.id,
        full_internet=environment.full_internet,
        allowed_destinations=environment.allowed_destinations,
        machines={
            role: MachineSpec(
                image=values.images[role],
                cpus=machine.size.cpus,
                memory_gib=machine.size.memory_gib,
                disk_gib=machine.size.disk_gib,
                public_key=public_key,
            )
            for role, machine in environment.machines.items()
        },
        variables=values.variables,
    )


def _endpoints(outputs: Mapping[str, object], environment: Environment) -> dict[Role, Endpoint]:
    try:
        machines = outputs["environments"][environment.id]["machines"]  # type: ignore[index]
        return {role: Endpoint.model_validate(machines[role]) for role in environment.machines}
    except (KeyError, TypeError, ValueError) as error:
        raise InfrastructureError(
            f"{product_that_runs().name} gave no endpoints for {environment.id}.",
            hint="Its log, terraform.log, is in the stack's directory.",
        ) from error
