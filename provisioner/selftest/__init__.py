"""The self-test of a cloud account: what provisioner does there, step by step, up to the first failure."""
