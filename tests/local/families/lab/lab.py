"""A family that leaves evidence of all that the driver does to it."""

import json
import os
import pathlib
import subprocess

import lab_assets


def _environment():
    return {name: value for name, value in os.environ.items() if name.startswith(("LAB_", "VM_"))}


class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = [
        "LAB_TOKEN",
        "VM_SSH_USERNAME",
        "VM_SSH_PRIVATE_KEY",
        "VM_IP_ADDRESS",
    ]

    @staticmethod
    def get_tasks():
        return {"pair": {"greeting": lab_assets.GREETING}}

    @staticmethod
    def get_instructions(t):
        return f"{t['greeting']} ${{HOME}} %{{if}} {{{{ 7 * 7 }}}} `id` ' \" end"

    @staticmethod
    def get_aux_vm_spec(t):
        return {
            "cpu_count_range": [1, 2],
            "ram_gib_range": [0.75, 2],
            "base_image_type": "debian-12",
            "build_steps": [
                {"type": "file", "source": "assets/note.txt", "destination": "notes/note.txt"},
                {"type": "shell", "commands": ["pwd > where.txt", "sudo touch /built-as-root"]},
            ],
        }

    @staticmethod
    def install():
        pathlib.Path("/opt/install-names.json").write_text(json.dumps(sorted(_environment())))

    @staticmethod
    def start(t):
        pathlib.Path("/root/start.json").write_text(json.dumps(_environment()))
        ssh = pathlib.Path("/home/agent/.ssh")
        ssh.mkdir(exist_ok=True)
        (ssh / "aux").write_text(os.environ["VM_SSH_PRIVATE_KEY"])
        (ssh / "aux").chmod(0o644)
        pathlib.Path("/home/agent/.hidden").write_text("given")
        subprocess.Popen(["sleep", "86400"])

    @staticmethod
    def score(t, submission):
        print("scored with", sorted(_environment()))
        return json.loads(submission)

    @staticmethod
    def teardown(t):
        print("torn down with", sorted(_environment()))
