"""Fakes of what unit tests cannot have (machines, a cloud, Terraform), as strict as the real thing."""
