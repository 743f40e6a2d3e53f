"""Makes moto as slow as EC2 about new images: what one request has changed, the next may not see yet.

EC2 API reference, "Ensuring idempotency" and "Eventual consistency": DescribeImages may say at first that a new
image does not exist, and CreateImage that an instance that has just been stopped is neither running nor stopped.
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError, InvalidAMIIdError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instances import Instance
from moto.ec2.responses.amis import AmisResponse


class IncorrectInstanceStateError(EC2ClientError):
    """Says that an instance is in another state than the request takes (EC2 API reference, "Error codes")."""

    def __init__(self, instance_id: str) -> None:
        super().__init__("IncorrectInstanceState", f"Instance '{instance_id}' is not 'running' or 'stopped'.")


def delay_new_images() -> None:
    """Patches moto."""
    create: Any = EC2Backend.create_image
    describe: Any = AmisResponse.describe_images
    stop: Any = Instance.stop

    def patched_stop(self: Any) -> Any:
        self.unseen = 1
        return stop(self)

    def patched_create(self: Any, instance_id: str, name: str, description: str, tag_specifications: list[Any]) -> Any:
        instance = self.get_instance(instance_id)
        if instance.state not in ("running", "stopped") or _is_unseen(instance):
            raise IncorrectInstanceStateError(instance_id)
        # moto does not know the tags of snapshots.
        image_tags = [given for given in tag_specifications if given["ResourceType"] == "image"]
        image = create(self, instance_id, name, description, image_tags)
        for tag in (tag for given in tag_specifications if given not in image_tags for tag in given["Tags"]):
            image.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
        image.unseen = 1
        return image

    def patched_describe(self: Any) -> Any:
        answer = describe(self)
        images = answer.result["Images"]
        seen = [image for image in images if not _is_unseen(image)]
        if self._get_param("ImageIds", []) and len(seen) < len(images):
            raise InvalidAMIIdError([image.id for image in images if image not in seen])
        answer.result["Images"] = seen
        return answer

    setattr(Instance, "stop", patched_stop)  # noqa: B010
    setattr(EC2Backend, "create_image", patched_create)  # noqa: B010
    setattr(AmisResponse, "describe_images", patched_describe)  # noqa: B010


def _is_unseen(resource: Any) -> bool:
    """Whether the news of a resource is not there yet: only the first call finds that."""
    unseen = getattr(resource, "unseen", 0)
    resource.unseen = 0
    return bool(unseen)
