"""The helper's operations: what the Task Standard's driver does with a family inside its machine."""
