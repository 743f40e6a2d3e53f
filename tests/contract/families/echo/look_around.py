"""Reads all that the metadata service tells a unit of an image, as early as it can, into /root/metadata.json."""

import json
import time
import urllib.request
from pathlib import Path

ROOT = "http://169.254.169.254/latest/"
ATTEMPTS = 60


def ask(path: str, method: str = "GET", **headers: str) -> str:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(ROOT + path, method=method, headers=names)
    with urllib.request.urlopen(request, timeout=2) as answer:
        return answer.read().decode(errors="replace")


def token() -> str:
    for _ in range(ATTEMPTS):
        try:
            return ask("api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
        except OSError:
            time.sleep(0.5)
    return ""


def walk(path: str, key: str) -> dict[str, str]:
    read = {}
    for name in ask(path, X_aws_ec2_metadata_token=key).split():
        # A public key is listed as `0=NAME` and read below `0/`.
        below = path + (name.partition("=")[0] + "/" if "=" in name else name)
        if below.endswith("/"):
            read |= walk(below, key)
        else:
            read[below] = ask(below, X_aws_ec2_metadata_token=key)
    return read


if key := token():
    told = {"user-data": ask("user-data", X_aws_ec2_metadata_token=key)}
    told |= walk("meta-data/", key) | walk("dynamic/", key)
    for asked in ("meta-data/iam/security-credentials/", "meta-data/tags/instance/"):
        try:
            told[asked] = ask(asked, X_aws_ec2_metadata_token=key)
        except OSError:
            continue
    Path("/root/metadata.json").write_text(json.dumps(told))
