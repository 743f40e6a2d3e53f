"""Stand-ins for what unit tests cannot have: machines, a cloud, Terraform; as strict as what they stand for."""
